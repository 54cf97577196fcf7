"""Context mass (Cache-Craft) from log-sum-exps in Triton: no attention per segment is computed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from ragcachekit_kernels.options import AttentionOptions
from ragcachekit_kernels.rows import DeviceRows
from ragcachekit_kernels.scores.column_scores import Launch, merged, with_sinks
from ragcachekit_kernels.scores.context import ContextMass
from ragcachekit_kernels.scores.deviation import span_sums
from ragcachekit_kernels.spans import Spans


def context_mass(
    query: torch.Tensor,
    key: torch.Tensor,
    rows: DeviceRows,
    lengths: Sequence[int],
    options: AttentionOptions,
) -> ContextMass:
    """As :func:`ragcachekit_kernels.dispatch.context_mass`.

    Log-sum-exps over the keys before the chunk and over the chunk, minus those over both, give each row's
    shares. A second pass sums the weights per key, and these are summed per segment.
    """
    ends = tuple(accumulate(lengths))
    begin = ends[-1] - lengths[-1]
    spans = Spans(((0, begin), (begin, ends[-1])))
    launch = Launch(query, key, rows, options, spans)
    parts = launch.log_sums()
    whole = with_sinks(merged(parts, launch.unit, 0), options.sinks, launch.unit)
    columns = launch.weight_sums(whole.expand_as(parts))
    segments = span_sums(columns, Spans(tuple(zip((0, *ends[:-1]), ends, strict=True)))).float()
    outward = torch.exp((parts[0] - whole) * launch.unit).sum(0)
    return ContextMass(columns, segments[:-1], segments[-1], outward)
