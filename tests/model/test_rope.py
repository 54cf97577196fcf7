"""Rotations: removing what was applied is the identity, what the probe finds, and tables of whole prompts."""

import json

import pytest
import torch

from benchmarks.families.families import all_families, build
from families import FAMILIES, LONGROPE_THRESHOLD, off, oracle, prefill, tokens, wrapped
from link_kit import described
from placing_kit import CPU, many_kinds
from ragcachekit.model.rope import Rope, describe_rope, note_of, rope_of_note

CHUNK = tokens(16, 3)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("offset", [0, 3, 77, 400])
class TestInvariant2:
    def test_apply_then_remove_is_the_identity(self, name, offset):
        rope = described(name)
        total = offset + len(CHUNK)
        angles = rope.angles(torch.arange(offset, total), total)
        for layer, keys in enumerate(prefill(oracle(name, total), CHUNK).keys):
            back, _ = rope.strip(layer, *rope.place(layer, keys, keys, angles), angles)
            assert off(back, keys) <= 1e-6

    def test_applied_elsewhere_is_the_models_own_layer_0(self, name, offset):
        """Layer 0 sees only embeddings, so its bare keys do not depend on the position at all."""
        rope, model = described(name), oracle(name, offset + len(CHUNK))
        total = offset + len(CHUNK)
        here = rope.angles(torch.arange(len(CHUNK)), total)
        keys = prefill(model, CHUNK).keys[0]
        bare, _ = rope.strip(0, keys, keys, here)
        there, _ = rope.place(0, bare, bare, rope.angles(torch.arange(offset, total), total))
        assert off(there, prefill(model, CHUNK, range(offset, total)).keys[0]) <= 1e-5


@pytest.mark.parametrize("name", FAMILIES)
def test_a_noted_rope_is_the_one_that_was_found_and_costs_no_forward(name, monkeypatch):
    found, model = described(name), wrapped(name)
    monkeypatch.setattr(type(model), "forward", lambda *_, **__: pytest.fail("a forward"))
    noted = rope_of_note(model, json.loads(json.dumps(note_of(found))))
    assert (noted.layers, noted.context, noted.exact_up_to) == (
        found.layers,
        found.context,
        found.exact_up_to,
    )
    at = torch.tensor([0, 1, 90])
    for ours, theirs in zip(noted.angles(at, 91), found.angles(at, 91), strict=True):
        assert torch.equal(ours.cos, theirs.cos)
        assert torch.equal(ours.sin, theirs.sin)
        assert ours.m == theirs.m


@pytest.mark.parametrize(
    ("name", "m"), [("llama", 1.0), ("qwen2-yarn", 0.1 * torch.tensor(4.0).log().item() + 1)]
)
def test_the_attention_scaling_is_kept_apart(name, m):
    (angles,) = described(name).angles(torch.arange(5), 5)
    assert angles.m == pytest.approx(m, rel=1e-6)
    assert torch.allclose(angles.cos**2 + angles.sin**2, torch.ones_like(angles.cos), atol=1e-5)


def test_layouts_as_the_families_define_them():
    assert all(layer.interleaved for layer in described("glm4").layers)
    assert all(layer.interleaved for layer in described("cohere").layers)
    assert not any(layer.interleaved for layer in described("llama").layers)
    assert [layer.table is None for layer in described("smollm3").layers] == [False, True, False]
    gemma = [layer.table for layer in described("gemma3").layers]
    assert gemma[0] == gemma[2] != gemma[1]


def test_only_longrope_depends_on_the_prompts_length():
    assert [name for name in FAMILIES if described(name).depends_on_length] == ["phi3-longrope"]
    rope = described("phi3-longrope")
    assert rope.regime(10) == rope.regime(64) != rope.regime(65) == rope.regime(500)


BY_NAME = {family.name: family for family in all_families()}


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3", "minicpm3"])
def test_latent_attention_keeps_its_rotary_part_with_the_values(name):
    rope = describe_rope(build(BY_NAME[name]))
    assert all(layer.values and layer.offset == 0 for layer in rope.layers)
    keys, values = torch.randn(1, 5, 24), torch.randn(1, 5, 8)
    angles = rope.angles(torch.arange(3, 8), 8)
    placed = rope.place(0, keys, values, angles)
    assert torch.equal(placed[0], keys)
    assert not torch.allclose(placed[1], values, atol=1e-2)
    assert torch.allclose(rope.strip(0, *placed, angles)[1], values, atol=1e-6)


def test_a_backward_rotation():
    assert all(layer.backwards for layer in describe_rope(build(BY_NAME["nanochat"])).layers)
    assert not any(layer.backwards for layer in describe_rope(build(BY_NAME["llama"])).layers)


@pytest.mark.parametrize("name", ["gpt_oss", "llama (yarn)"])
def test_a_lone_token_at_the_start_has_as_many_pairs_as_any_other(name):
    """All angles are 0 there: columns look repeated, and the attention scaling must reach every dimension."""
    (table, *_) = describe_rope(build(BY_NAME[name])).tables
    lone, later = table.angles(torch.tensor([0]), 1), table.angles(torch.tensor([0, 5]), 6)
    assert lone.cos.shape[-1] == later.cos.shape[-1] == 8
    assert lone.m == pytest.approx(later.m) != 1.0


@pytest.mark.parametrize(
    ("context", "asked", "sizes"),
    [(512, [10, 500, 512], [512]), (40_000, [10, 2048, 2049, 33_000], [2048, 4096, 40_000])],
)
def test_tables_are_made_once_and_grow(monkeypatch, context, asked, sizes):
    rope = Rope(many_kinds().tables, many_kinds().layers, context)
    made = []
    real = rope.angles
    monkeypatch.setattr(rope, "angles", lambda *args: made.append(args[1]) or real(*args))
    for length in asked:
        turns = rope.turns_on(CPU, length)
        assert rope.turns_on(CPU, length) is turns
        assert len(turns) == 2 * len(rope.tables)
        for number, table in enumerate(rope.tables):
            angles = table.angles(torch.arange(length), length)
            cos, sin = turns[number]
            torch.testing.assert_close(cos[:length], angles.cos * angles.m)
            torch.testing.assert_close(sin[:length], angles.sin * angles.m)
            torch.testing.assert_close(turns[number + len(rope.tables)][1], -sin)
    assert made == sizes


def test_tables_follow_the_length_where_frequencies_do():
    rope = described("phi3-longrope")
    short, long = LONGROPE_THRESHOLD - 1, LONGROPE_THRESHOLD + 1
    for length in (short, long, short, 3, 4 * long, long):
        ((cos, sin),) = rope.turns_on(CPU, length)
        (angles,) = rope.angles(torch.arange(length), length)
        torch.testing.assert_close(cos[:length], angles.cos * angles.m)
        torch.testing.assert_close(sin[:length], angles.sin * angles.m)
    assert rope.turns_on(CPU, short) is rope.turns_on(CPU, short)
