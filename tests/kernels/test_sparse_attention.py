"""Sparse-row attention against a float64 loop that softmaxes one row over exactly the keys it may see."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ragcachekit_kernels.attention import tiled
from ragcachekit_kernels.dispatch import AttentionOptions, sparse_attention

NAN = float("nan")


def by_row(query, key, value, positions, *, scale, window=None, softcap=None, sinks=None):
    """One row and head at a time, in float64, keys sliced: nothing is masked."""
    groups = query.shape[0] // key.shape[0]
    out = torch.zeros(query.shape[0], len(positions), value.shape[-1], dtype=torch.float64)
    for head in range(query.shape[0]):
        for row, position in enumerate(positions):
            start = 0 if window is None else max(0, position - window + 1)
            seen = slice(start, position + 1)
            scores = key[head // groups, seen].double() @ query[head, row].double() * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            weights = scores.exp()
            total = weights.sum() + (0 if sinks is None else sinks[head].double().exp())
            out[head, row] = (weights / total) @ value[head // groups, seen].double()
    return out


def drawn(kv_heads, groups, tokens, width, value_width, rows, seed=0, dtype=torch.float32):
    random = torch.Generator().manual_seed(seed)

    def tensor(*shape):
        return torch.randn(*shape, generator=random, dtype=torch.float64).to(dtype)

    return (
        tensor(kv_heads * groups, rows, width),
        tensor(kv_heads, tokens, width),
        tensor(kv_heads, tokens, value_width),
    )


@st.composite
def cases(draw):
    tokens = draw(st.integers(1, 300))
    picked = draw(
        st.one_of(
            st.lists(st.integers(0, tokens - 1), min_size=1, max_size=20, unique=True).map(sorted),
            st.just(list(range(tokens))),
            st.integers(0, tokens - 1).map(lambda start: list(range(start, tokens))),
        )
    )
    return {
        "sizes": (
            draw(st.integers(1, 3)),
            draw(st.integers(1, 8)),
            tokens,
            draw(st.sampled_from([1, 2, 5, 16])),
            draw(st.sampled_from([1, 3, 16])),
        ),
        "positions": picked,
        "window": draw(st.one_of(st.none(), st.integers(1, tokens + 5))),
        "softcap": draw(st.one_of(st.none(), st.sampled_from([0.5, 30.0]))),
        "sinks": draw(st.booleans()),
        "seed": draw(st.integers(0, 1000)),
    }


@settings(max_examples=60, deadline=None, derandomize=True)
@given(case=cases())
def test_any_shape_against_the_float64_loop(case):
    positions = case["positions"]
    query, key, value = drawn(*case["sizes"], len(positions), case["seed"])
    options = {
        "scale": case["sizes"][3] ** -0.5,
        "window": case["window"],
        "softcap": case["softcap"],
        "sinks": torch.linspace(-2, 3, query.shape[0]) if case["sinks"] else None,
    }
    ours = sparse_attention(query, key, value, positions, AttentionOptions(**options))
    assert ours.shape == (query.shape[0], len(positions), value.shape[-1])
    assert ours.dtype == torch.float32
    torch.testing.assert_close(
        ours.double(), by_row(query, key, value, positions, **options), rtol=2e-5, atol=2e-5
    )


@pytest.mark.parametrize("groups", range(1, 9))
def test_every_group_size(groups):
    positions = [0, 3, 4, 50, 51, 140, 299]
    query, key, value = drawn(2, groups, 300, 8, 8, len(positions))
    want = by_row(query, key, value, positions, scale=0.3, window=33)
    ours = sparse_attention(query, key, value, positions, AttentionOptions(scale=0.3, window=33))
    torch.testing.assert_close(ours.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [127, 128, 129, 256, 257])
@pytest.mark.parametrize("gap", [1, 2])
def test_around_the_size_of_a_tile(rows, gap):
    positions = [5 + gap * i for i in range(rows)]
    query, key, value = drawn(1, 2, positions[-1] + 9, 4, 4, rows)
    for window in (None, 7, 200):
        want = by_row(query, key, value, positions, scale=0.5, window=window)
        ours = sparse_attention(query, key, value, positions, AttentionOptions(scale=0.5, window=window))
        torch.testing.assert_close(ours.double(), want, rtol=1e-5, atol=1e-5)


def test_float64_agrees_to_its_own_precision():
    positions = [2, 9, 10, 77]
    query, key, value = drawn(2, 3, 90, 8, 8, 4, dtype=torch.float64)
    sinks = torch.linspace(-1, 1, 6, dtype=torch.float64)
    options = {"scale": 0.4, "window": 20, "softcap": 3.0, "sinks": sinks}
    want = by_row(query, key, value, positions, **options)
    ours = sparse_attention(query, key, value, positions, AttentionOptions(**options))
    torch.testing.assert_close(ours, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_its_type_and_sums_in_float32(dtype):
    positions = list(range(100, 200, 7))
    query, key, value = drawn(2, 2, 200, 16, 16, len(positions), dtype=dtype)
    want = by_row(query, key, value, positions, scale=0.25)
    ours = sparse_attention(query, key, value, positions, AttentionOptions(scale=0.25))
    assert ours.dtype == dtype
    torch.testing.assert_close(ours.double(), want, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sinks", [None, torch.full((2,), -30.0)])
def test_thousands_of_equal_weights_in_half_precision(dtype, sinks):
    """A sum of weights in 16 bits would stop growing at 256 of them (bfloat16) or 2,048 (float16)."""
    query, value = torch.zeros(2, 3, 8, dtype=dtype), torch.ones(1, 4096, 8, dtype=dtype)
    _, key, _ = drawn(1, 2, 4096, 8, 8, 3, dtype=dtype)
    options = AttentionOptions(scale=1.0, sinks=sinks)
    ours = sparse_attention(query, key, value, [4000, 4001, 4095], options)
    torch.testing.assert_close(ours.float(), torch.ones(2, 3, 8), rtol=8e-3, atol=0)


class TestPoison:
    """What a row may not see is not read, so NaN there does not spread."""

    def test_keys_and_values_after_the_last_position(self):
        positions = [0, 1, 40, 79]
        query, key, value = drawn(2, 2, 120, 8, 8, 4)
        want = sparse_attention(query, key, value, positions, AttentionOptions(scale=0.3))
        key[:, 80:] = NAN
        value[:, 80:] = NAN
        ours = sparse_attention(query, key, value, positions, AttentionOptions(scale=0.3))
        assert torch.equal(ours, want)
        assert not ours.isnan().any()

    def test_neighbours_outside_the_window(self):
        positions = [50, 150]
        query, key, value = drawn(2, 2, 200, 8, 8, 2)
        want = sparse_attention(query, key, value, positions, AttentionOptions(scale=0.3, window=10))
        outside = [p for p in range(200) if not (41 <= p <= 50 or 141 <= p <= 150)]
        key[:, outside] = NAN
        value[:, outside] = NAN
        ours = sparse_attention(query, key, value, positions, AttentionOptions(scale=0.3, window=10))
        assert torch.equal(ours, want)

    def test_poison_inside_does_show(self):
        query, key, value = drawn(1, 1, 20, 4, 4, 1)
        key[:, 11] = NAN
        assert sparse_attention(query, key, value, [15], AttentionOptions(scale=0.3)).isnan().all()
        assert sparse_attention(query, key, value, [15], AttentionOptions(scale=0.3, window=5)).isnan().all()
        assert (
            not sparse_attention(query, key, value, [15], AttentionOptions(scale=0.3, window=4)).isnan().any()
        )

    def test_keys_between_the_rows_of_a_tile_are_masked(self):
        """Row 10 and row 20 share a tile: NaN scores of row 10 are hidden before the softmax."""
        query, key, value = drawn(1, 2, 30, 4, 4, 2)
        want = sparse_attention(query, key, value, [10, 20], AttentionOptions(scale=0.3))
        key[:, 15] = NAN
        ours = sparse_attention(query, key, value, [10, 20], AttentionOptions(scale=0.3))
        assert torch.equal(ours[:, 0], want[:, 0])
        assert ours[:, 1].isnan().all()

    def test_inputs_are_not_written_to(self):
        query, key, value = drawn(2, 2, 50, 8, 8, 3)
        before = [t.clone() for t in (query, key, value)]
        sparse_attention(query, key, value, [3, 20, 49], AttentionOptions(scale=0.3, window=7, softcap=2.0))
        assert all(torch.equal(a, b) for a, b in zip(before, (query, key, value), strict=True))

    def test_large_scores_do_not_overflow(self):
        query, key, value = drawn(1, 1, 30, 4, 4, 2)
        ours = sparse_attention(query * 1e4, key * 1e4, value, [10, 29], AttentionOptions(scale=1.0))
        assert torch.isfinite(ours).all()


def test_a_single_key_is_its_value():
    query, key, value = drawn(2, 3, 10, 4, 5, 1)
    ours = sparse_attention(query, key, value, [0], AttentionOptions(scale=0.3))
    torch.testing.assert_close(ours[:, 0], value[:, 0].repeat_interleave(3, 0))


def test_no_rows():
    query, key, value = drawn(2, 2, 10, 4, 5, 0)
    assert sparse_attention(query, key, value, [], AttentionOptions(scale=0.3)).shape == (4, 0, 5)


def test_keys_that_are_views_of_a_larger_buffer():
    query, key, value = drawn(2, 2, 60, 8, 8, 2)
    want = by_row(query, key[:, 10:], value[:, 10:], [5, 49], scale=0.3)
    ours = sparse_attention(query, key[:, 10:], value[:, 10:], [5, 49], AttentionOptions(scale=0.3))
    torch.testing.assert_close(ours.double(), want, rtol=1e-5, atol=1e-5)


class TestRefused:
    @pytest.mark.parametrize("positions", [[3, 2], [3, 3], [-1, 2], [0, 10], [0, 5, 2]])
    def test_positions_out_of_order_or_outside(self, positions):
        query, key, value = drawn(1, 1, 10, 4, 4, len(positions))
        with pytest.raises(ValueError, match=r"ascending (within 0\.\.9|and not negative)"):
            sparse_attention(query, key, value, positions, AttentionOptions(scale=1.0))

    def test_a_position_too_few(self):
        query, key, value = drawn(1, 1, 10, 4, 4, 3)
        with pytest.raises(ValueError, match="3 query rows but 2 positions"):
            sparse_attention(query, key, value, [1, 2], AttentionOptions(scale=1.0))

    def test_heads_that_do_not_divide(self):
        query, _, _ = drawn(1, 3, 10, 4, 4, 1)
        _, key, value = drawn(2, 1, 10, 4, 4, 1)
        with pytest.raises(ValueError, match="3 query heads cannot share 2 KV heads"):
            sparse_attention(query, key, value, [1], AttentionOptions(scale=1.0))


@given(
    positions=st.lists(st.integers(0, 2000), min_size=1, max_size=400, unique=True).map(sorted),
    width=st.sampled_from([16, 576, 4096]),
    window=st.sampled_from([None, 1, 10, 100]),
)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_tiles_cover_all_rows_in_order_and_end_where_a_gap_costs_more_than_a_tile(positions, width, window):
    ranges = list(tiled.tiles(positions, width, window))
    assert [row for start, stop in ranges for row in range(start, stop)] == list(range(len(positions)))
    for start, stop in ranges:
        assert 0 < stop - start <= tiled.TILE_ROWS
        for row in range(start + 1, stop):
            keys_between = positions[row] - positions[row - 1] - 1
            assert (row - start) * keys_between * width <= tiled.GAP_PRODUCTS
            assert window is None or keys_between < window
    for (start, stop), (after, _) in pairwise(ranges):
        keys_between = positions[after] - positions[stop - 1] - 1
        ended = stop - start == tiled.TILE_ROWS or (window is not None and keys_between >= window)
        assert ended or (stop - start) * keys_between * width > tiled.GAP_PRODUCTS


def test_no_tiles_without_rows():
    assert list(tiled.tiles([], 576)) == []
