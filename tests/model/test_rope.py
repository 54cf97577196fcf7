"""Invariant 2: removing what was applied is the identity; applying is what the model does at layer 0."""

from __future__ import annotations

import pytest
import torch

from families import FAMILIES, off, oracle, prefill, tokens
from link_kit import described

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
