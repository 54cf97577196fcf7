"""``bench kernels``: attention of chosen rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from benchmarks.kernels.cases import TOLERANCE, Case, Sizes, distance, largest, row_scores, row_sets
from ragcachekit_kernels import dispatch
from ragcachekit_kernels.dispatch import AttentionOptions, Rows


def attention_cases(sizes: Sizes) -> Iterator[Case]:
    """Sparse-row attention of one layer."""
    kv = [
        (
            sizes.random(sizes.kv_heads, sizes.tokens, sizes.head_dim, salt=2 * i),
            sizes.random(sizes.kv_heads, sizes.tokens, sizes.head_dim, salt=2 * i + 1),
        )
        for i in range(sizes.sets)
    ]
    for name, positions in row_sets(sizes.tokens, sizes.seed).items():
        rows = Rows(positions)
        query = sizes.random(sizes.heads, len(positions), sizes.head_dim, salt=99)
        options = AttentionOptions(sizes.scale)
        calls = [partial(dispatch.sparse_attention, query, k, v, rows, options) for k, v in kv]
        yield Case(
            "sparse_attention",
            name,
            *_work(sizes, name, positions),
            calls,
            partial(_attention_error, calls[0], query, *kv[0], positions, sizes.scale),
            TOLERANCE[sizes.dtype],
            positions,
        )


def _work(sizes: Sizes, name: str, positions: Sequence[int]) -> tuple[float, str]:
    """Of one layer, and its unit: the question alone is bound by reading the KV, others by multiplying."""
    if name == "question":
        return 2.0 * sizes.kv_heads * sizes.tokens * sizes.head_dim * sizes.dtype.itemsize, "GB/s"
    return 4.0 * sizes.heads * sizes.head_dim * sum(position + 1 for position in positions), "TFLOP/s"


def _attention_error(
    call: Callable[[], torch.Tensor],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: Sequence[int],
    scale: float,
) -> float:
    """All heads, one row at a time over exactly the keys that it sees, at rows all over the prompt."""
    out = call()
    distances = []
    for at in _spread(len(positions), 24):
        stop = positions[at] + 1
        weights = torch.softmax(row_scores(query, key[:, :stop], at, scale), -1)
        expected = weights @ value[:, :stop].double()
        distances.append(distance(out[:, at].double().view_as(expected), expected))
    return largest(distances, [out])


def _spread(count: int, wanted: int) -> list[int]:
    """Up to ``wanted`` of ``count`` indices, first and last among them."""
    return sorted({round(i * (count - 1) / max(wanted - 1, 1)) for i in range(wanted)})
