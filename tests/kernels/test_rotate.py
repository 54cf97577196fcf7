"""Rotation against complex multiplication in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ragcachekit_kernels.dispatch import rotate

THETA = 10000.0


def angles(positions, pairs):
    frequencies = THETA ** (-torch.arange(pairs, dtype=torch.float64) / pairs)
    return torch.tensor(positions, dtype=torch.float64)[:, None] * frequencies


def turned(x, turn, interleaved, offset, m=1.0):
    """Pair i of the rotated stretch as a complex number, times m e^(i angle)."""
    pairs = turn.shape[-1]
    first = [offset + (2 * i if interleaved else i) for i in range(pairs)]
    second = [offset + (2 * i + 1 if interleaved else i + pairs) for i in range(pairs)]
    wide = x.double()
    numbers = torch.complex(wide[..., first], wide[..., second]) * m * torch.exp(1j * turn)
    out = wide.clone()
    out[..., first], out[..., second] = numbers.real, numbers.imag
    return out


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    pairs=st.integers(1, 9),
    before=st.integers(0, 5),
    after=st.integers(0, 5),
    interleaved=st.booleans(),
    positions=st.lists(st.integers(0, 5000), min_size=1, max_size=6),
    m=st.sampled_from([1.0, 0.5, 1.19]),
)
def test_is_a_complex_multiplication(pairs, before, after, interleaved, positions, m):
    x = torch.randn(
        3, len(positions), before + 2 * pairs + after, generator=torch.Generator().manual_seed(pairs)
    )
    turn = angles(positions, pairs)
    ours = rotate(
        x, (turn.cos() * m).float(), (turn.sin() * m).float(), interleaved=interleaved, offset=before
    )
    torch.testing.assert_close(ours.double(), turned(x, turn, interleaved, before, m), rtol=1e-5, atol=1e-6)
    assert torch.equal(ours[..., :before], x[..., :before])
    assert torch.equal(ours[..., before + 2 * pairs :], x[..., before + 2 * pairs :])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(dtype):
    x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    turn = angles([3, 700, 1234], 4)
    ours = rotate(x, turn.cos().float(), turn.sin().float())
    assert ours.dtype == dtype
    assert torch.equal(ours, turned(x, turn, False, 0).float().to(dtype))


def test_the_argument_is_not_written_to():
    x = torch.randn(1, 2, 8, generator=torch.Generator().manual_seed(2))
    before = x.clone()
    turn = angles([5, 6], 2)
    ours = rotate(x, turn.cos(), turn.sin())
    assert torch.equal(x, before)
    assert ours.data_ptr() != x.data_ptr()
