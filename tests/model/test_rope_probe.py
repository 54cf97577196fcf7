"""What the probe finds where rotations are unusual."""

from __future__ import annotations

import pytest
import torch

from benchmarks.families.families import all_families, build
from ragcachekit.model.rope import describe_rope

FAMILIES = {family.name: family for family in all_families()}


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3", "minicpm3"])
def test_latent_attention_keeps_its_rotary_part_with_the_values(name):
    rope = describe_rope(build(FAMILIES[name]))
    assert all(layer.values and layer.offset == 0 for layer in rope.layers)
    keys, values = torch.randn(1, 5, 24), torch.randn(1, 5, 8)
    angles = rope.angles(torch.arange(3, 8), 8)
    placed = rope.place(0, keys, values, angles)
    assert torch.equal(placed[0], keys)
    assert not torch.allclose(placed[1], values, atol=1e-2)
    assert torch.allclose(rope.strip(0, *placed, angles)[1], values, atol=1e-6)


def test_a_backward_rotation():
    assert all(layer.backwards for layer in describe_rope(build(FAMILIES["nanochat"])).layers)
    assert not any(layer.backwards for layer in describe_rope(build(FAMILIES["llama"])).layers)


@pytest.mark.parametrize("name", ["gpt_oss", "llama (yarn)"])
def test_a_lone_token_at_the_start_has_as_many_pairs_as_any_other(name):
    """All angles are 0 there: columns look repeated, and the attention scaling must reach every dimension."""
    (table, *_) = describe_rope(build(FAMILIES[name])).tables
    lone, later = table.angles(torch.tensor([0]), 1), table.angles(torch.tensor([0, 5]), 6)
    assert lone.cos.shape[-1] == later.cos.shape[-1] == 8
    assert lone.m == pytest.approx(later.m) != 1.0
