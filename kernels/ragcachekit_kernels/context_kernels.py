"""Cache-Craft's sums from log-sum-exps: no attention per segment is computed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from ragcachekit_kernels.column_scores import log_sums, merged, unit, weight_sums, with_sinks
from ragcachekit_kernels.context import ContextMass
from ragcachekit_kernels.deviation import span_sums
from ragcachekit_kernels.rows import DeviceRows
from ragcachekit_kernels.spans import Spans


def context_mass(
    query: torch.Tensor,
    key: torch.Tensor,
    rows: DeviceRows,
    lengths: Sequence[int],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> ContextMass:
    """As :func:`ragcachekit_kernels.dispatch.context_mass`.

    Two passes over two spans of keys, what stands before the chunk and the chunk: the log-sum-exps of each
    row, whose difference from that over both is the row's share; then the sums per key, and from these the
    sums per segment.
    """
    ends = tuple(accumulate(lengths))
    begin = ends[-1] - lengths[-1]
    spans = Spans(((0, begin), (begin, ends[-1])))
    options: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap}
    one = unit(scale, softcap)
    parts = log_sums(query, key, rows, spans, **options)
    whole = with_sinks(merged(parts, one, 0), sinks, one)
    columns = weight_sums(query, key, rows, spans, whole.expand_as(parts), **options)
    segments = span_sums(columns, Spans(tuple(zip((0, *ends[:-1]), ends, strict=True)))).float()
    outward = torch.exp((parts[0] - whole) * one).sum(0)
    return ContextMass(columns, segments[:-1], segments[-1], outward)
