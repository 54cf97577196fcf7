"""What is taken out of a cache goes back to where it was, in memory of its own."""

from types import SimpleNamespace

import pytest
import torch

from link_kit import plan_of
from placing_kit import SHAPES, assembled, many_kinds
from ragcachekit.model.kv import ChunkKV, Stretch, extract
from ragcachekit.plan.link_plan import Piece

COLUMNS = 23
STRETCHES = [Stretch(1, 4, 16), Stretch(0, 4, 5), Stretch(0, 2, 23), Stretch(1, 15, 16)]


def cache(shapes=SHAPES, dtype=torch.float32, poisoned=()):
    """Layers of a batch of two, NaN where nobody may look."""
    random = torch.Generator().manual_seed(0)

    def side(heads, dim):
        out = torch.randn(2, heads, COLUMNS + 3, dim, generator=random)[:, :, :COLUMNS]
        for item, column in poisoned:
            out[item, :, column] = float("nan")
        return out.to(dtype)

    return [SimpleNamespace(keys=side(h, k), values=side(h, v)) for h, k, v in shapes]


def assert_in_own_memory(kv):
    """Nothing is kept alive beside it."""
    sides = (*kv[0], *kv[1])
    blocks = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in sides}
    assert sum(blocks.values()) == sum(t.nbytes for t in sides)


@pytest.mark.parametrize("length", [COLUMNS, 60])
def test_placing_gives_back_the_cache_of_every_kind_of_layer(length):
    """Interleaved, partial, backward and latent rotations and none."""
    rope = many_kinds()
    layers = cache(poisoned=[(item, column) for item in (0, 1) for column in (0, 1)])
    for (item, start, stop), kv in zip(STRETCHES, extract(layers, STRETCHES, rope, length), strict=True):
        assert_in_own_memory(kv)
        rest = [p for p in range(COLUMNS) if not start <= p < stop]
        back = assembled(plan_of(range(COLUMNS), [Piece(start, ChunkKV(*kv))], rest), rope)
        for layer, pair in zip(layers, back, strict=True):
            for ours, was in zip(pair, (layer.keys, layer.values), strict=True):
                torch.testing.assert_close(
                    ours[:, start:stop], was[item, :, start:stop], rtol=1e-5, atol=1e-5
                )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("host", [True, False])
def test_without_rope_rows_are_copied_to_the_bit(dtype, host):
    layers = cache(dtype=dtype)
    for (item, start, stop), kv in zip(STRETCHES, extract(layers, STRETCHES, host=host), strict=True):
        for layer, keys, values in zip(layers, *kv, strict=True):
            assert torch.equal(keys, layer.keys[item, :, start:stop])
            assert torch.equal(values, layer.values[item, :, start:stop])
    layers[1].keys.zero_()
    assert kv[0][1].count_nonzero() > 0, "a copy"
