"""The one place that chooses an implementation; callers import from here and nowhere else."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from ragcachekit_kernels import reference, tiled

rotate = reference.rotate


def sparse_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: Sequence[int],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of rows at ascending ``positions`` over keys ``0..tokens-1``.

    Shapes and arguments as in :func:`ragcachekit_kernels.reference.sparse_attention`.

    Raises
    ------
    ValueError
        If the positions are not ascending or lie outside the keys, or the heads do not divide.
    """
    _check(query, key, positions)
    if not positions:
        return query.new_empty(query.shape[0], 0, value.shape[-1])
    return tiled.sparse_attention(
        query, key, value, positions, scale=scale, window=window, softcap=softcap, sinks=sinks
    )


def column_scores(
    query: torch.Tensor,
    key: torch.Tensor,
    positions: Sequence[int],
    spans: Sequence[tuple[int, int]] | None = None,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention that each key gets from rows at ascending ``positions``, summed over heads and rows.

    Shapes, arguments and errors as in :func:`ragcachekit_kernels.reference.column_scores` and
    :func:`sparse_attention`.
    """
    _check(query, key, positions)
    for start, stop in spans or ():
        if not 0 <= start <= stop <= key.shape[1]:
            raise ValueError(f"the span {start}..{stop} does not lie within {key.shape[1]} keys")
    return tiled.column_scores(
        query, key, positions, spans, scale=scale, window=window, softcap=softcap, sinks=sinks
    )


def _check(query: torch.Tensor, key: torch.Tensor, positions: Sequence[int]) -> None:
    rows, tokens = query.shape[1], key.shape[1]
    if len(positions) != rows:
        raise ValueError(f"{rows} query rows but {len(positions)} positions")
    if query.shape[0] % key.shape[0]:
        raise ValueError(f"{query.shape[0]} query heads cannot share {key.shape[0]} KV heads")
    if rows and (positions[0] < 0 or positions[-1] >= tokens or any(a >= b for a, b in pairwise(positions))):
        raise ValueError(f"positions must be ascending within 0..{tokens - 1}")
