"""Launches of :mod:`.scores_kernels`.

Column scores and context mass: softmax weights per key, summed over heads and rows.

Scores are not stored. A tile of query vectors stays in shared memory during a loop over the keys. Its
log-sum-exps come from a kernel that divides the keys among programs. Where each span gets a program, that
program computes them, and the keys are in the L2 cache for the second pass. Every tile adds into its own row
of a buffer. Its rows are summed at the end, so the order of programs does not matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import triton

from ragcachekit_kernels.arguments import AttentionOptions, Spans
from ragcachekit_kernels.backend import (
    FUSED,
    LOG2E,
    dense,
    factors,
    launching_on,
    padded,
    processors,
    upcast,
)
from ragcachekit_kernels.in_torch import ContextMass, span_sums
from ragcachekit_kernels.scores_kernels import columns_kernel, deviation_kernel, log_sums_kernel

RESIDENT = 2
"""Programs per multiprocessor: one computes exponentials while the other multiplies."""

SHORTEST = 256
"""Number of keys up to which they are not divided among programs."""

SLOTS = 16
"""Rows of the buffer of sums per KV head at most; further tiles share them."""


DEVIATION_ROWS = 8
"""Rows per program of the deviation: 16 KiB of either 16-bit tensor for 8 heads of 128 dimensions."""


class Tiling(NamedTuple):
    """Query vectors and keys of a tile; warps, stages and registers of a program."""

    vectors: int
    block: int
    warps: int
    stages: int
    registers: int | None


def tiling(vectors: int, head_dim: int, dtype: torch.dtype, *, plain: bool, fused: bool) -> Tiling:
    """Tiling for ``vectors`` query vectors per KV head (rows times the query heads that share it).

    A tile holds as many 16-bit vectors as the registers allow, so that each key is loaded once. With a bound
    on the registers, two ``plain`` programs (no window, no soft-cap) fit on a multiprocessor.
    """
    if dtype == torch.float32:  # three products each, operands in registers: larger tiles would spill
        if head_dim <= 64:
            return Tiling(min(padded(vectors), 32), 64, 8, 2, None)
        return Tiling(16, 64 if head_dim <= 128 else 32, 4, 2, None)
    most = 128 if head_dim > 128 or fused else 256
    rows = min(padded(vectors), most)
    return Tiling(rows, 64, 8 if rows >= 128 else 4, 3, 128 if plain and head_dim <= 128 else None)


def unit(options: AttentionOptions) -> float:
    """Factor from the kernels' scores to natural ones: theirs are not scaled, or to base 2."""
    return options.scale if options.softcap is None else 1.0 / LOG2E


def merged(parts: torch.Tensor, unit: float, dim: int) -> torch.Tensor:
    """Log-sum-exp of log-sum-exps along ``dim``, in their unit; exactly the greatest if it is far above.

    Not ``torch.logsumexp``: a change of units would round it once more.
    """
    top = parts.amax(dim, keepdim=True)
    base = top.masked_fill(top == float("-inf"), 0.0)
    return base.squeeze(dim) + torch.exp((parts - base) * unit).sum(dim).log() / unit


def with_sinks(sums: torch.Tensor, sinks: torch.Tensor | None, unit: float) -> torch.Tensor:
    """Log-sum-exps ``[..., heads, rows]`` in their unit, with the sinks' natural logits among the scores."""
    if sinks is None:
        return sums
    extra = (sinks.float() / unit)[:, None].expand_as(sums)
    return merged(torch.stack((sums, extra)), unit, 0)


def column_scores(
    query: torch.Tensor,
    key: torch.Tensor,
    positions: torch.Tensor,
    options: AttentionOptions,
    spans: Spans | None = None,
) -> torch.Tensor:
    """As :func:`ragcachekit_kernels.dispatch.column_scores`."""
    if spans is not None and query.dtype != torch.float32:
        launch = Launch(query, key, positions, options, spans, fused=True)
        if launch.cuts == 1:  # spans enough for a program each
            return launch.weight_sums(None)
    launch = Launch(query, key, positions, options, spans)
    return launch.weight_sums(launch.log_sums())


def context_mass(
    query: torch.Tensor,
    key: torch.Tensor,
    positions: torch.Tensor,
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
    launch = Launch(query, key, positions, options, spans)
    parts = launch.log_sums()
    whole = with_sinks(merged(parts, launch.unit, 0), options.sinks, launch.unit)
    columns = launch.weight_sums(whole.expand_as(parts))
    segments = span_sums(columns, tuple(zip((0, *ends[:-1]), ends, strict=True))).float()
    outward = torch.exp((parts[0] - whole) * launch.unit).sum(0)
    return ContextMass(columns, segments[:-1], segments[-1], outward)


class Launch:
    """Arguments that both kernels take, as for :func:`column_scores`, and the division of the work.

    With ``fused`` a program computes the log-sum-exps of its keys itself, and its tiles are smaller.
    """

    def __init__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        positions: torch.Tensor,
        options: AttentionOptions,
        spans: Spans | None,
        *,
        fused: bool = False,
    ) -> None:
        query, key = dense(query), dense(key)
        group = query.shape[0] // key.shape[0]
        how = tiling(len(positions) * group, query.shape[2], query.dtype, plain=options.is_plain, fused=fused)
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
            "KV_HEADS": key.shape[0],
            "GROUP": group,
            "D": query.shape[2],
            "PADDED": padded(query.shape[2]),
            "VECTORS": how.vectors,
            "BLOCK": how.block,
            "SPANS": spans is not None,
            "WINDOW": options.window is not None,
            "SOFTCAP": options.softcap is not None,
            "UPCAST": upcast(query.dtype),
            "num_warps": how.warps,
            "num_stages": how.stages,
            **FUSED,
        }
        if how.registers is not None and self.once:
            self.options["maxnreg"] = how.registers

    def log_sums(self) -> torch.Tensor:
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

    def weight_sums(self, sums: torch.Tensor | None) -> torch.Tensor:
        """Sums of weights ``[tokens]`` by log-sum-exps as of :meth:`log_sums`; None: of its own keys."""
        query, key, positions, _ = self.inputs
        out = query.new_zeros(self.slots * key.shape[0], key.shape[1], dtype=torch.float32)
        read, apart = (positions, (0, 0, 0)) if sums is None else (sums, sums.stride())
        if self.parts:
            grid = (self.slots, key.shape[0], self.parts * self.cuts)
            with launching_on(key.device):
                columns_kernel[grid](
                    *self.inputs, read, out, *self.numbers, *self.strides, *apart,
                    LSE=sums is not None, ONCE=self.once, **self.options,
                )  # fmt: skip
        return out.sum(0)

    def _cuts(self, key: torch.Tensor, spans: Spans | None) -> int:
        """Number of programs that share the keys of each span, enough to occupy the device."""
        ranges = ((0, key.shape[1]),) if spans is None else spans
        longest = max((stop - start for start, stop in ranges), default=0)
        programs = max(self.parts * key.shape[0] * self.slots, 1)
        wanted = RESIDENT * processors(key.device) // programs
        return int(max(1, min(wanted, longest // SHORTEST)))


def kv_deviation(new: torch.Tensor, old: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """As :func:`ragcachekit_kernels.dispatch.kv_deviation`."""
    new, old = dense(new), dense(old)
    heads, rows, dim = new.shape
    out = torch.empty(rows, dtype=torch.float32, device=new.device)
    with launching_on(new.device):
        deviation_kernel[(triton.cdiv(rows, DEVIATION_ROWS),)](
            new, old, positions, rows, out, *new.stride()[:2], *old.stride()[:2], HEADS=heads, D=dim,
            PADDED=padded(dim), ROWS=DEVIATION_ROWS, num_warps=4, **FUSED,
        )  # fmt: skip
    return out
