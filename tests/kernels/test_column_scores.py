"""Attention sums per key against a float64 loop over single rows, keys sliced: nothing is masked."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ragcachekit_kernels.dispatch import AttentionOptions, column_scores


def by_row(query, key, positions, spans, *, scale, window=None, softcap=None, sinks=None):
    groups = query.shape[0] // key.shape[0]
    out = torch.zeros(key.shape[1], dtype=torch.float64)
    for head in range(query.shape[0]):
        for row, position in enumerate(positions):
            low = 0 if window is None else max(0, position - window + 1)
            for start, stop in [(0, key.shape[1])] if spans is None else spans:
                seen = slice(max(start, low), min(stop, position + 1))
                if seen.start >= seen.stop:
                    continue
                scores = key[head // groups, seen].double() @ query[head, row].double() * scale
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                extra = sinks[head].double().exp() if sinks is not None and spans is None else 0.0
                out[seen] += scores.exp() / (scores.exp().sum() + extra)
    return out


@st.composite
def cases(draw):
    tokens = draw(st.integers(1, 200))
    positions = draw(
        st.one_of(
            st.lists(st.integers(0, tokens - 1), min_size=1, max_size=12, unique=True).map(sorted),
            st.integers(0, tokens - 1).map(lambda start: list(range(start, tokens))),
        )
    )
    edges = sorted(draw(st.lists(st.integers(0, tokens), max_size=8)))
    spans = list(zip(edges[::2], edges[1::2], strict=False))
    return {
        "sizes": (
            draw(st.integers(1, 2)),
            draw(st.integers(1, 4)),
            tokens,
            draw(st.sampled_from([1, 4, 16])),
        ),
        "positions": positions,
        "spans": draw(st.sampled_from([None, spans])),
        "window": draw(st.one_of(st.none(), st.integers(1, tokens + 3))),
        "softcap": draw(st.sampled_from([None, 3.0])),
        "sinks": draw(st.booleans()),
        "seed": draw(st.integers(0, 99)),
    }


def drawn(kv_heads, groups, tokens, width, rows, seed):
    random = torch.Generator().manual_seed(seed)
    query = torch.randn(kv_heads * groups, rows, width, generator=random)
    return query, torch.randn(kv_heads, tokens, width, generator=random)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(case=cases())
def test_any_shape_against_the_float64_loop(case):
    positions = case["positions"]
    query, key = drawn(*case["sizes"], len(positions), case["seed"])
    options = {
        "scale": case["sizes"][3] ** -0.5,
        "window": case["window"],
        "softcap": case["softcap"],
        "sinks": torch.linspace(-2, 3, query.shape[0]) if case["sinks"] else None,
    }
    ours = column_scores(query, key, positions, AttentionOptions(**options), case["spans"])
    assert ours.dtype == torch.float32
    want = by_row(query, key, positions, case["spans"], **options)
    torch.testing.assert_close(ours.double(), want, rtol=3e-5, atol=3e-5)


def test_more_rows_than_a_tile_and_each_row_gives_one():
    query, key = drawn(2, 2, 300, 8, 300, 0)
    sums = column_scores(query, key, range(300), AttentionOptions(scale=0.3))
    assert float(sums.sum()) == pytest.approx(300 * 4, rel=1e-5)
    torch.testing.assert_close(
        sums.double(), by_row(query, key, range(300), None, scale=0.3), rtol=1e-4, atol=1e-4
    )


def test_half_precision_is_summed_in_single():
    query, key = drawn(1, 2, 150, 16, 20, 3)
    low = column_scores(
        query.bfloat16(), key.bfloat16(), range(130, 150), AttentionOptions(scale=0.25), [(0, 100)]
    )
    assert low.dtype == torch.float32
    want = by_row(query.bfloat16(), key.bfloat16(), range(130, 150), [(0, 100)], scale=0.25)
    torch.testing.assert_close(low.double(), want, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("span", [(-1, 3), (4, 2), (0, 11)])
def test_spans_outside_the_keys_are_refused(span):
    query, key = drawn(1, 1, 10, 4, 1, 0)
    with pytest.raises(ValueError, match="span"):
        column_scores(query, key, [9], AttentionOptions(scale=1.0), [span])
