"""``bench kernels``: what rows are chosen by: column scores of the question."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from benchmarks.kernels.cases import CHUNK, QUESTION, Case, Sizes, row_scores, row_sets
from ragcachekit_kernels import dispatch
from ragcachekit_kernels.dispatch import AttentionOptions, Rows, Spans


def score_cases(sizes: Sizes) -> Iterator[Case]:
    """Column scores of the question's rows over every layer, in one softmax and one per chunk."""
    positions = row_sets(sizes.tokens, sizes.seed)["question"]
    rows = Rows(positions)
    query = sizes.random(sizes.heads, len(positions), sizes.head_dim, salt=98)
    keys = [
        sizes.random(sizes.kv_heads, sizes.tokens, sizes.head_dim, salt=200 + i) for i in range(sizes.layers)
    ]
    options = AttentionOptions(sizes.scale)
    starts = range(0, sizes.tokens - QUESTION, CHUNK)
    chunked = Spans(tuple((start, min(start + CHUNK, sizes.tokens - QUESTION)) for start in starts))
    for name, spans in (("all keys", None), ("per chunk", chunked)):
        one = partial(dispatch.column_scores, positions=rows, spans=spans, options=options)

        def all_layers(one: Callable[..., torch.Tensor] = one) -> list[torch.Tensor]:
            return [one(query, key) for key in keys]

        yield Case(
            "column_scores",
            f"{name}, {sizes.layers} layers",
            sum(key.numel() * key.element_size() for key in keys),
            "GB/s",
            [all_layers],
            partial(_score_error, all_layers, query, keys, positions, spans, sizes.scale),
            # Sums of float32 weights; what differs is the rounding of scores from 16-bit products.
            1e-4,
            positions,
        )


def _score_error(
    call: Callable[[], list[torch.Tensor]],
    query: torch.Tensor,
    keys: Sequence[torch.Tensor],
    positions: Sequence[int],
    spans: Sequence[tuple[int, int]] | None,
    scale: float,
) -> float:
    found, key = call()[-1].double(), keys[-1]
    expected = torch.zeros_like(found)
    for at, position in enumerate(positions):
        scores = row_scores(query, key, at, scale)
        for start, stop in spans or [(0, key.shape[1])]:
            stop = min(stop, position + 1)
            if start < stop:
                expected[start:stop] += torch.softmax(scores[..., start:stop], -1).sum((0, 1))
    return float((found - expected).abs().max() / expected.abs().max())
