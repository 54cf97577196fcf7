"""What is taken out of a cache by kernel is what the CPU path takes, and goes back to where it was."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from benchmarks.families.families import build, families
from families import LONGROPE_THRESHOLD, tokens, wrapped
from link_kit import described, plan_of
from placing_kit import SHAPES, cpu_path, many_kinds
from ragcachekit.encode.in_prompt import InPromptEncoder
from ragcachekit.encode.similar import NeighbourEncoder
from ragcachekit.encode.standalone import ChunkEncoder
from ragcachekit.forward.attention import install
from ragcachekit.forward.attention_sums import ObservedCache
from ragcachekit.model import extract as room
from ragcachekit.model.encoding import Encoding, InPromptEncoding
from ragcachekit.model.extract import Stretch, extract
from ragcachekit.model.kv import ChunkKV
from ragcachekit.model.rope.probe import describe_rope
from ragcachekit.model.tensor_block import ALIGN
from ragcachekit.plan.encodings import Encodings
from ragcachekit.plan.link_plan import Missing, Piece
from ragcachekit.store.memory import HostStore
from ragcachekit.types import KVKey
from ragcachekit_kernels import dispatch

COLUMNS = 23
STRETCHES = [Stretch(1, 4, 16), Stretch(0, 4, 5), Stretch(0, 2, 23), Stretch(1, 15, 16)]


@pytest.fixture
def by_triton(monkeypatch):
    """From the call on, rows are taken by kernel; how often is counted. All else is as it was, and quick."""
    taken = []
    real = dispatch.disassemble

    def counted(planes, places, chunks, tables):
        taken.append(len(planes))
        with monkeypatch.context() as patch:
            patch.setenv("RAGCACHEKIT_KERNELS", "triton")
            real(planes, places, chunks, tables)

    def begin():
        monkeypatch.setattr(room.dispatch, "uses_triton", lambda device: True)
        monkeypatch.setattr(room.dispatch, "disassemble", counted)
        return taken

    return begin


def cache(shapes=SHAPES, dtype=torch.float32, poisoned=()):
    """Layers of a batch of two, NaN where nobody may look."""
    random = torch.Generator().manual_seed(0)

    def side(heads, dim):
        out = torch.randn(2, heads, COLUMNS + 3, dim, generator=random)[:, :, :COLUMNS]
        for item, column in poisoned:
            out[item, :, column] = float("nan")
        return out.to(dtype)

    return [SimpleNamespace(keys=side(h, k), values=side(h, v)) for h, k, v in shapes]


def close(ours, theirs):
    for one, other in zip((*ours.keys, *ours.values), (*theirs.keys, *theirs.values), strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def in_own_memory(kv):
    """Contiguous, and nothing kept alive beside it."""
    sides = (*kv.keys, *kv.values)
    blocks = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in sides}
    assert all(t.is_contiguous() for t in sides)
    return sum(blocks.values()) <= sum(t.nbytes for t in sides) + ALIGN * len(sides)


@pytest.mark.parametrize("length", [COLUMNS, 60])
def test_every_kind_of_layer_as_on_the_cpu_path_and_back(length, by_triton):
    """Interleaved, partial, backward and latent rotations and none; placing gives the cache back."""
    rope = many_kinds()
    hidden = [(item, column) for item in (0, 1) for column in (0, 1)]
    layers = cache(poisoned=hidden)
    theirs = extract(layers, STRETCHES, rope, length)
    taken = by_triton()
    ours = extract(layers, STRETCHES, rope, length)
    assert taken == [2 * len(SHAPES)] * len(STRETCHES), "one launch for all layers of a stretch"
    for stretch, one, other in zip(STRETCHES, ours, theirs, strict=True):
        close(one, other)
        assert in_own_memory(one)
        piece = Piece(stretch.start, ChunkKV(*one))
        rest = [p for p in range(COLUMNS) if not stretch.start <= p < stretch.stop]
        columns = slice(stretch.start, stretch.stop)
        back = cpu_path(plan_of(range(COLUMNS), [piece], rest), rope)
        for layer, (keys, values) in zip(layers, back, strict=True):
            was = layer.keys[stretch.item, :, columns], layer.values[stretch.item, :, columns]
            torch.testing.assert_close(keys[0, :, columns], was[0], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(values[0, :, columns], was[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("host", [True, False])
def test_without_rope_rows_are_copied_to_the_bit(dtype, host, by_triton):
    layers = cache(dtype=dtype)
    # A model whose heads lie behind its tokens: rows are not one behind the other.
    layers[0].keys = layers[0].keys.transpose(1, 2).contiguous().transpose(1, 2)
    by_triton()
    for (item, start, stop), kv in zip(STRETCHES, extract(layers, STRETCHES, host=host), strict=True):
        for layer, keys, values in zip(layers, kv.keys, kv.values, strict=True):
            assert torch.equal(keys, layer.keys[item, :, start:stop])
            assert torch.equal(values, layer.values[item, :, start:stop])
    layers[1].keys.zero_()
    assert kv.keys[1].count_nonzero() > 0, "a copy"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
@pytest.mark.parametrize("locked", [True, False])
def test_on_a_gpu_rows_come_to_the_host_and_tiers_hold_them_as_configured(locked):
    rope, layers = many_kinds(), cache()
    there = [SimpleNamespace(keys=x.keys.cuda(), values=x.values.cuda()) for x in layers]
    ours = extract(there, STRETCHES, rope, COLUMNS, locked=locked)
    for one, other in zip(ours, extract(layers, STRETCHES, rope, COLUMNS), strict=True):
        assert one.keys[0].is_pinned() is locked
        close(one, other)
    key = KVKey("model", "space", "chunk", "standalone", ())
    for pinned in (True, False):
        store = HostStore(1 << 26, pinned=pinned)
        assert store.put(key, ChunkKV(*ours[0]))
        assert store.get(key).kv.keys[0].is_pinned() is pinned
    stays = extract(there, STRETCHES, host=False)
    assert torch.equal(stays[0].keys[0], there[0].keys[1, :, 4:16])


def test_nothing_to_take():
    assert extract(cache(), [], many_kinds(), COLUMNS) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="memory can be page-locked here")
@pytest.mark.parametrize("locked", [True, False])
def test_memory_that_cannot_be_page_locked_is_ordinary_memory(locked):
    block = torch.arange(7, dtype=torch.uint8)
    copied = room._to_host(block, locked)
    assert torch.equal(copied, block)
    assert copied.data_ptr() != block.data_ptr()


CHUNKS = [tokens(n, n) for n in (9, 12)]
NAMES = ["llama", "glm4", "smollm3", "phi3-longrope", "deepseek_v2"]
"""Halves, neighbours, none in one layer, a part with m and frequencies of long prompts, latent."""


def model_of(name):
    if name == "deepseek_v2":
        (family,) = (family for family in families() if family.name == name)
        model = build(family)
        return model, describe_rope(model)
    return wrapped(name), described(name)


@pytest.mark.parametrize(("name", "prefix"), [*((name, False) for name in NAMES), ("llama", True)])
def test_encoded_chunks_are_those_of_the_cpu_path(name, prefix, by_triton):
    model, rope = model_of(name)
    encoder = ChunkEncoder(model, rope)
    length = LONGROPE_THRESHOLD + 9 if name == "phi3-longrope" else 0
    encoding = Encoding("prefix") if prefix else Encoding("x", tokens(5, 9), length)
    theirs = dict(encoder.encode(CHUNKS, encoding))
    taken = by_triton()
    # A new encoder cuts the same batches: one that knows the size of KV takes more chunks at first.
    ours = dict(ChunkEncoder(model, rope).encode(CHUNKS, encoding))
    assert len(taken) == len(CHUNKS)
    for index, kv in theirs.items():
        assert ours[index].start == kv.start == (0 if prefix else None)
        close(ours[index], kv)
        assert in_own_memory(ours[index])
        if prefix:
            assert all(map(torch.equal, ours[index].keys, kv.keys)), "as the model rotated them"


def behind(*parts):
    key = KVKey("model", "space", "chunk", "in-prompt", tuple(str(len(part)) for part in parts[:-1]))
    ids = tuple(token for part in parts[:-1] for token in part)
    return Missing(key, parts[-1], InPromptEncoding("in-prompt", ids, 0, tuple(map(len, parts[:-1]))))


def test_chunks_of_a_prompt_are_those_of_the_cpu_path(by_triton):
    model, rope = wrapped("glm4"), described("glm4")
    install(model)
    a, b, c = tokens(5, 1), tokens(7, 2), tokens(6, 3)
    items = [behind(a, b), behind(a, b, c)]
    theirs = dict(InPromptEncoder(model, rope).encode(items))
    taken = by_triton()
    ours = dict(InPromptEncoder(model, rope).encode(items))
    assert len(taken) == 2
    for item, kv in theirs.items():
        close(ours[item], kv)
        assert sorted(ours[item].sums) == sorted(kv.sums)


def test_chunks_behind_neighbours_are_those_of_the_cpu_path(by_triton):
    name, near = "llama", (tokens(6, 3), tokens(4, 4))
    model, rope = wrapped(name), described(name)
    install(model)
    encodings = Encodings("similar:2", rope, 1, lambda _: near)
    encoding, context = encodings.encoding(CHUNKS[0], tokens(5, 1))
    item = Missing(encodings.key(CHUNKS[0], encoding, context, "model", "space", 0), CHUNKS[0], encoding)

    def encoded():
        chunks = ChunkEncoder(model, rope, ObservedCache)
        ((_, kv),) = NeighbourEncoder(model, rope, chunks, HostStore(1 << 26)).encode([item])
        return kv

    theirs = encoded()
    taken = by_triton()
    ours = encoded()
    assert len(taken) == 5, "the text, two neighbours, the chunk, and the chunk behind the text alone"
    close(ours, theirs)
    assert in_own_memory(ours)
