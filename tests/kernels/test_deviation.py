"""Squared deviation per row and sums over spans against float64 loops, in torch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ragcachekit_kernels import dispatch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NAN = float("nan")


def drawn(*shape, seed, dtype=torch.float32):
    random = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=random, dtype=torch.float64).to(dtype).to(DEVICE)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    heads=st.integers(1, 8),
    width=st.sampled_from([1, 16, 40, 64]),
    positions=st.lists(st.integers(0, 59), min_size=1, max_size=30, unique=True).map(sorted),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 99),
)
def test_any_shape_against_the_float64_loop(heads, width, positions, dtype, seed):
    new = drawn(heads, len(positions), width, seed=seed, dtype=dtype)
    old = drawn(heads, 60, width, seed=seed + 1000, dtype=dtype)
    old[:, [p for p in range(60) if p not in positions]] = NAN
    ours = dispatch.kv_deviation(new, old, positions)
    want = [
        sum(float((new[h, r].double() - old[h, p].double()).square().sum()) for h in range(heads))
        for r, p in enumerate(positions)
    ]
    assert ours.dtype == torch.float32
    want = torch.tensor(want, dtype=torch.float64)
    torch.testing.assert_close(ours.double().cpu(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("positions", [[3, 2], [-1, 2], [0, 10]])
def test_positions_out_of_order_or_outside_are_refused(positions):
    with pytest.raises(ValueError, match="positions must be ascending"):
        dispatch.kv_deviation(drawn(1, 2, 4, seed=0), drawn(1, 10, 4, seed=0), positions)


def test_other_heads_are_refused():
    with pytest.raises(ValueError, match="differ in heads"):
        dispatch.kv_deviation(drawn(2, 1, 4, seed=0), drawn(1, 10, 4, seed=0), [3])


@pytest.mark.parametrize("spans", [[], [(0, 3000)], [(5, 5), (7, 8), (900, 2100), (0, 4)]])
def test_sums_over_spans(spans):
    values = drawn(3000, seed=5)
    ours = dispatch.span_sums(values, spans)
    want = torch.tensor([sum(values[a:b].tolist()) for a, b in spans], dtype=torch.float64)
    assert ours.dtype == torch.float64
    torch.testing.assert_close(ours.cpu(), want, rtol=1e-12, atol=1e-10)
    with pytest.raises(ValueError, match="does not lie within"):
        dispatch.span_sums(values, [(0, 3001)])
