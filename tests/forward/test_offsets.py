"""Invariant 3: a chunk encoded once and linked at offset d is the chunk run alone at d, d+1, ..."""

import pytest
import torch

from families import BY_POSITION, FAMILIES, THRESHOLD, build, off, oracle, prefill, tokens, wrapped
from link_kit import described
from ragcachekit.encode.encoders import ChunkEncoder
from ragcachekit.engine.grade import admit, tolerance_for
from ragcachekit.errors import ModelNotSupported
from ragcachekit.model.encoding import Encoding
from ragcachekit.model.rope import LayerRope, Rope

TOLERANCE = 3e-5
CHUNK = tokens(24, 5)
# Before and beyond windows of 8 and the longrope threshold of 64, up to the end of the context.
OFFSETS = (0, 1, 7, 39, 41, 200, 488)
WITHIN = (0, 1, 7, 39, 41, THRESHOLD - len(CHUNK))
PLACES = [(name, at) for name in FAMILIES for at in (WITHIN if name in BY_POSITION else OFFSETS)]


def placed(name, rope, offset, length=0):
    """K and V of every layer, encoded once and linked at ``offset``."""
    total = offset + len(CHUNK)
    # Frequencies that depend on the prompt's length are part of the key: encoded for that length.
    encoding = Encoding("standalone", length=total if rope.depends_on_length else 0)
    ((_, kv),) = ChunkEncoder(wrapped(name), rope).encode([CHUNK], encoding)
    angles = rope.angles(torch.arange(offset, total), total)
    return [rope.place(i, k, k, angles)[0] for i, k in enumerate(kv.keys)], list(kv.values)


def worst(name, rope, offset):
    """Over all layers, against the model run at those positions."""
    where = range(offset, offset + len(CHUNK))
    theirs = prefill(oracle(name, offset + len(CHUNK)), CHUNK, where)
    keys, values = placed(name, rope, offset)
    pairs = [*zip(keys, theirs.keys, strict=True), *zip(values, theirs.values, strict=True)]
    return max(off(a, b) for a, b in pairs)


def altered(rope, change):
    """The description with ``change`` applied to every layer that rotates."""
    layers = [layer if layer.table is None else change(layer) for layer in rope.layers]
    return Rope(rope.tables, layers, rope.context)


@pytest.mark.parametrize(("name", "offset"), PLACES)
def test_linked_at_an_offset_is_run_at_that_offset(name, offset):
    assert worst(name, described(name), offset) <= TOLERANCE


def test_ministral3_scales_its_queries_after_the_threshold():
    """Else its thresholds would hide nothing."""
    assert worst("ministral3", described("ministral3"), THRESHOLD - len(CHUNK) // 2) > 100 * TOLERANCE


def rotation_off(layer):
    return LayerRope(None)


def other_layout(layer):
    return LayerRope(layer.table, not layer.interleaved, layer.offset)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("wrong", [rotation_off, other_layout])
class TestTheCheckCanFail:
    """Position 0 hides every rotation error; other offsets do not, and the model is refused."""

    def test_admission_refuses_it_and_names_the_layer(self, name, wrong):
        rope = altered(described(name), wrong)
        with pytest.raises(ModelNotSupported, match=r"layer 0: keys at offset \d+ differ .* by \d"):
            admit(build(name), rope)


def test_admission_names_the_one_layer_that_is_wrong():
    rope = described("gemma3")
    # The full layer with the sliding layers' theta.
    layers = [rope.layers[0], LayerRope(rope.layers[0].table), rope.layers[2]]
    with pytest.raises(ModelNotSupported, match="layer 1: keys at offset"):
        admit(build("gemma3"), Rope(rope.tables, layers, rope.context))


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_admitted_with_room_to_spare(name):
    model = wrapped(name)
    assert 0 < admit(model, described(name)) <= tolerance_for(model.dtype) / 3
