"""Column scores and context mass: launches of :mod:`.scores_kernels`.

Softmax weights per key are summed over heads and rows. Scores are not stored: one kernel finds the
log-sum-exp of each row, with the keys divided among programs; another loops over the keys with a tile of
query vectors in shared memory. Every tile adds into its own row of a buffer. Its rows are summed at the end,
so the order of programs does not matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ragcachekit_kernels.arguments import AttentionOptions, Spans
from ragcachekit_kernels.in_torch import ContextMass, span_sums
from ragcachekit_kernels.launch import FUSED, LOG2E, dense, factors, launching_on, padded, processors, upcast
from ragcachekit_kernels.scores_kernels import columns_kernel, log_sums_kernel

RESIDENT = 2
"""Programs per multiprocessor: one computes exponentials while the other multiplies."""

SHORTEST = 256
"""Number of keys up to which they are not divided among programs."""

SLOTS = 16
"""Rows of the buffer of sums per KV head at most; further tiles share them."""


class Tiling(NamedTuple):
    """Query vectors and keys of a tile; warps, stages and registers of a program."""

    vectors: int
    block: int
    warps: int
    stages: int
    registers: int | None


def tiling(vectors: int, head_dim: int, dtype: torch.dtype, plain: bool) -> Tiling:
    """Tiling for ``vectors`` query vectors per KV head (rows times the query heads that share it).

    A tile holds as many 16-bit vectors as the registers allow, so that each key is loaded once. With a bound
    on the registers, two ``plain`` programs (no window, no soft-cap) fit on a multiprocessor.
    """
    if dtype == torch.float32:  # three products each, operands in registers: larger tiles would spill
        if head_dim <= 64:
            return Tiling(min(padded(vectors), 32), 64, 8, 2, None)
        return Tiling(16, 64 if head_dim <= 128 else 32, 4, 2, None)
    most = 128 if head_dim > 128 else 256
    rows = min(padded(vectors), most)
    return Tiling(rows, 64, 8 if rows >= 128 else 4, 3, 128 if plain and head_dim <= 128 else None)


def unit(options: AttentionOptions) -> float:
    """Factor from the kernels' scores to natural ones: theirs are not scaled, or to base 2."""
    return options.scale if options.softcap is None else 1.0 / LOG2E


def merged(parts: Tensor, unit: float, dim: int) -> Tensor:
    """Log-sum-exp of log-sum-exps along ``dim``, in their unit; exactly the greatest if it is far above.

    Not ``torch.logsumexp``: a change of units would round it once more.
    """
    top = parts.amax(dim, keepdim=True)
    base = top.masked_fill(top == float("-inf"), 0.0)
    return base.squeeze(dim) + torch.exp((parts - base) * unit).sum(dim).log() / unit


def with_sinks(sums: Tensor, sinks: Tensor | None, unit: float) -> Tensor:
    """Log-sum-exps ``[..., heads, rows]`` in their unit, with the sinks' natural logits among the scores."""
    if sinks is None:
        return sums
    extra = (sinks.float() / unit)[:, None].expand_as(sums)
    return merged(torch.stack((sums, extra)), unit, 0)


def column_scores(
    query: Tensor, key: Tensor, positions: Tensor, options: AttentionOptions, spans: Spans | None = None
) -> Tensor:
    """As :func:`ragcachekit_kernels.dispatch.column_scores`."""
    launch = Launch(query, key, positions, options, spans)
    return launch.weight_sums(launch.log_sums())


def context_mass(
    query: Tensor, key: Tensor, positions: Tensor, lengths: Sequence[int], options: AttentionOptions
) -> ContextMass:
    """As :func:`ragcachekit_kernels.dispatch.context_mass`.

    Log-sum-exps over the keys before the chunk and over the chunk, minus those over both, give each row's
    shares. A second pass sums the weights per key, and these are summed per segment.
    """
    ends = tuple(accumulate(lengths))
    begin = ends[-1] - lengths[-1]
    spans = Spans(((0, begin), (begin, ends[-1])))
    launch = Launch(query, key, positions, options, spans)
    parts = launch.log_sums()
    whole = with_sinks(merged(parts, launch.unit, 0), options.sinks, launch.unit)
    columns = launch.weight_sums(whole.expand_as(parts))
    segments = span_sums(columns, tuple(zip((0, *ends[:-1]), ends, strict=True))).float()
    outward = torch.exp((parts[0] - whole) * launch.unit).sum(0)
    return ContextMass(segments[:-1], segments[-1], outward)


class Launch:
    """Arguments that both kernels take, as for :func:`column_scores`, and the division of the work."""

    def __init__(
        self, query: Tensor, key: Tensor, positions: Tensor, options: AttentionOptions, spans: Spans | None
    ) -> None:
        query, key = dense(query), dense(key)
        group = query.shape[0] // key.shape[0]
        how = tiling(len(positions) * group, query.shape[2], query.dtype, options.is_plain)
        self.unit = unit(options)
        self.sinks = options.sinks if spans is None else None
        self.parts = 1 if spans is None else len(spans)
        self.tiles = -(-len(positions) * group // how.vectors)
        self.slots = -(-self.tiles // -(-self.tiles // SLOTS))
        self.once = self.slots == self.tiles
        self.cuts = self._cuts(key, spans)
        # Without spans the kernels do not read them.
        self.inputs = query, key, positions, positions if spans is None else spans.on(key.device)
        self.numbers = *factors(options), options.window or 0, self.cuts, key.shape[1], len(positions)
        self.strides = query.stride(0), query.stride(1), key.stride(0), key.stride(1)
        self.options: dict[str, Any] = {
            **{"KV_HEADS": key.shape[0], "GROUP": group},
            **{"D": query.shape[2], "PADDED": padded(query.shape[2])},
            **{"VECTORS": how.vectors, "BLOCK": how.block, "SPANS": spans is not None},
            **{"WINDOW": options.window is not None, "SOFTCAP": options.softcap is not None},
            **{"UPCAST": upcast(query.dtype), "num_warps": how.warps, "num_stages": how.stages, **FUSED},
        }
        if how.registers is not None and self.once:
            self.options["maxnreg"] = how.registers

    def log_sums(self) -> Tensor:
        """Log-sum-exps of rows' scores over each span separately, or over all keys with the sinks.

        ``[spans, heads, rows]`` float32 (one span if None are given), natural logarithms divided by
        :func:`unit`. They are minus infinity where a row sees nothing of a span.
        """
        query, key, positions, _ = self.inputs
        shape = (self.parts, self.cuts, len(positions), query.shape[0])
        out = query.new_empty(shape, dtype=torch.float32)
        if self.parts:
            grid = (self.tiles, key.shape[0], self.parts * self.cuts)
            with launching_on(key.device):
                log_sums_kernel[grid](*self.inputs, out, *self.numbers, *self.strides, **self.options)
        whole = (out.squeeze(1) if self.cuts == 1 else merged(out, self.unit, 1)).transpose(1, 2)
        return with_sinks(whole, self.sinks, self.unit)

    def weight_sums(self, sums: Tensor) -> Tensor:
        """Sums of weights ``[tokens]`` by log-sum-exps as of :meth:`log_sums`."""
        query, key, _, _ = self.inputs
        out = query.new_zeros(self.slots * key.shape[0], key.shape[1], dtype=torch.float32)
        if self.parts:
            grid = (self.slots, key.shape[0], self.parts * self.cuts)
            with launching_on(key.device):
                columns_kernel[grid](
                    *self.inputs, sums, out, *self.numbers, *self.strides, *sums.stride(), ONCE=self.once,
                    **self.options,
                )  # fmt: skip
        return out.sum(0)

    def _cuts(self, key: Tensor, spans: Spans | None) -> int:
        """Number of programs that share the keys of each span, enough to occupy the device."""
        ranges = ((0, key.shape[1]),) if spans is None else spans
        longest = max((stop - start for start, stop in ranges), default=0)
        programs = max(self.parts * key.shape[0] * self.slots, 1)
        wanted = RESIDENT * processors(key.device) // programs
        return int(max(1, min(wanted, longest // SHORTEST)))
