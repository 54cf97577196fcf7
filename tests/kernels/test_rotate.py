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


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("offset", [0, 4])
class TestAsAGroup:
    def rotate(self, x, positions, interleaved, offset, sign=1):
        turn = angles(positions, 6)
        return rotate(x, turn.cos(), sign * turn.sin(), interleaved=interleaved, offset=offset)

    def x(self):
        return torch.randn(2, 4, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def test_minus_sin_is_the_inverse(self, interleaved, offset):
        there = self.rotate(self.x(), [1, 50, 999, 4000], interleaved, offset)
        assert (there - self.x()).abs().max() > 0.1
        back = self.rotate(there, [1, 50, 999, 4000], interleaved, offset, sign=-1)
        torch.testing.assert_close(back, self.x(), rtol=1e-12, atol=1e-12)

    def test_two_rotations_add_up(self, interleaved, offset):
        twice = self.rotate(
            self.rotate(self.x(), [1, 2, 3, 4], interleaved, offset), [9, 8, 7, 6], interleaved, offset
        )
        once = self.rotate(self.x(), [10, 10, 10, 10], interleaved, offset)
        torch.testing.assert_close(twice, once, rtol=1e-12, atol=1e-12)

    def test_position_0_is_the_identity(self, interleaved, offset):
        assert torch.equal(self.rotate(self.x(), [0] * 4, interleaved, offset), self.x())

    def test_scores_depend_on_the_distance_only(self, interleaved, offset):
        query, key = self.x()[0, :1], self.x()[1, :1]

        def score(at, other):
            a = self.rotate(query, [at], interleaved, offset)
            return float((a * self.rotate(key, [other], interleaved, offset)).sum())

        assert score(100, 93) == pytest.approx(score(7, 0), abs=1e-10)
        assert score(100, 93) != pytest.approx(score(8, 0), abs=1e-3)


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
