"""Attention that keys get from given rows, in Triton: softmax weights per key, summed over heads and rows.

Scores are never written down. A tile of query vectors stays in shared memory while keys stream past it. Its
log-sum-exps come from the caller (attention has them), from a kernel of their own that divides the keys
among programs, or from the same program where there are spans enough for a program each: their keys are then
in the L2 cache when they are needed the second time. Every tile adds into a row of its own of a buffer whose
rows are summed at the end, so results do not depend on which program comes first.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ragcachekit_kernels.launch import FUSED, LOG2E, launching_on, padded, processors, upcast
from ragcachekit_kernels.rows import DeviceRows
from ragcachekit_kernels.score_kernels import columns_kernel, log_sums_kernel
from ragcachekit_kernels.spans import Spans

RESIDENT = 2
"""Programs that a multiprocessor holds at a time: one computes exponentials while the other multiplies."""

SHORTEST = 256
"""Keys that are not divided among programs."""

SLOTS = 16
"""Rows of the buffer of sums per KV head, at most; more tiles than that share them."""


class Tiling(NamedTuple):
    """How a launch is cut up: query vectors and keys of a tile, warps, stages and registers of a program."""

    vectors: int
    block: int
    warps: int
    stages: int
    registers: int | None


def tiling(vectors: int, head_dim: int, dtype: torch.dtype, *, plain: bool, fused: bool) -> Tiling:
    """For so many query vectors per KV head (rows times the query heads that share it).

    Of 16-bit vectors as many in a tile as the registers allow, so that keys come to a multiprocessor once;
    ``plain`` kernels (no window, no soft-cap) fit two to a multiprocessor, if they are told to.
    """
    if dtype == torch.float32:  # three products each, operands in registers: larger tiles would spill
        if head_dim <= 64:
            return Tiling(min(padded(vectors), 32), 64, 8, 2, None)
        return Tiling(16, 64 if head_dim <= 128 else 32, 4, 2, None)
    most = 128 if head_dim > 128 or fused else 256
    rows = min(padded(vectors), most)
    return Tiling(rows, 64, 8 if rows >= 128 else 4, 3, 128 if plain and head_dim <= 128 else None)


def log_sums(
    query: torch.Tensor,
    key: torch.Tensor,
    rows: DeviceRows,
    spans: Spans | None = None,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Log-sum-exps of rows' scores over each span by itself, or over all keys with the sinks.

    Arguments as of :func:`ragcachekit_kernels.reference.column_scores`. Returns ``[spans, heads, room]``
    float32 (one span if None are given), natural logarithms divided by :func:`unit`: minus infinity where a
    row sees nothing of a span, anything in rows from the count on.
    """
    run = _Launch(query, key, rows, spans, scale=scale, window=window, softcap=softcap)
    out = query.new_empty(run.parts, run.cuts, rows.room, query.shape[0], dtype=torch.float32)
    if run.parts:
        grid = (run.tiles, key.shape[0], run.parts * run.cuts)
        with launching_on(key.device):
            log_sums_kernel[grid](*run.inputs, out, *run.numbers, rows.room, *run.strides, **run.options)
    one = unit(scale, softcap)
    whole = (out.squeeze(1) if run.cuts == 1 else merged(out, one, 1)).transpose(1, 2)
    return whole if spans is not None else with_sinks(whole, sinks, one)


def unit(scale: float, softcap: float | None) -> float:
    """What the kernels' scores are multiplied by to be natural ones: theirs are not scaled, or to base 2."""
    return scale if softcap is None else 1.0 / LOG2E


def merged(parts: torch.Tensor, unit: float, dim: int) -> torch.Tensor:
    """One log-sum-exp of those along ``dim``, in their unit: the greatest, to the bit, if it is far above.

    Not ``torch.logsumexp``: a change of units would round it once more.
    """
    top = parts.amax(dim, keepdim=True)
    base = top.masked_fill(top == float("-inf"), 0.0)
    return base.squeeze(dim) + torch.exp((parts - base) * unit).sum(dim).log() / unit


def with_sinks(sums: torch.Tensor, sinks: torch.Tensor | None, unit: float) -> torch.Tensor:
    """Log-sum-exps ``[..., heads, room]`` in their unit, with the sinks' natural logits among the scores."""
    if sinks is None:
        return sums
    extra = (sinks.float() / unit)[:, None].expand_as(sums)
    return merged(torch.stack((sums, extra)), unit, 0)


def column_scores(
    query: torch.Tensor,
    key: torch.Tensor,
    rows: DeviceRows,
    spans: Spans | None = None,
    *,
    lse: torch.Tensor | None = None,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """As :func:`ragcachekit_kernels.reference.column_scores`.

    A given ``lse`` halves the work: everything is multiplied once.
    """
    options: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap}
    if lse is not None:
        sums = lse[None].float() / unit(scale, softcap)
        return weight_sums(query, key, rows, spans, sums, **options)
    if spans is not None and query.dtype != torch.float32:
        run = _Launch(query, key, rows, spans, **options, fused=True)
        if run.cuts == 1:  # spans enough for a program each
            return run.weight_sums(None)
    sums = log_sums(query, key, rows, spans, sinks=sinks, **options)
    return weight_sums(query, key, rows, spans, sums, **options)


def weight_sums(
    query: torch.Tensor,
    key: torch.Tensor,
    rows: DeviceRows,
    spans: Spans | None,
    sums: torch.Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """``[tokens]``: sums of weights by given log-sum-exps, ``[spans, heads, room]`` in :func:`unit`.

    Given the spans that :func:`log_sums` had, scores are those that it summed.
    """
    return _Launch(query, key, rows, spans, scale=scale, window=window, softcap=softcap).weight_sums(sums)


class _Launch:
    """Arguments that both kernels take, and how the work is divided."""

    def __init__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        rows: DeviceRows,
        spans: Spans | None,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        fused: bool = False,
    ) -> None:
        query, key = _dense(query), _dense(key)
        group = query.shape[0] // key.shape[0]
        plain = window is None and softcap is None
        how = tiling(rows.room * group, query.shape[2], query.dtype, plain=plain, fused=fused)
        self.parts = 1 if spans is None else len(spans)
        self.tiles = -(-rows.room * group // how.vectors)
        self.slots = -(-self.tiles // -(-self.tiles // SLOTS))
        self.once = self.slots == self.tiles
        self.cuts = self._cuts(key, spans)
        self.inputs = (
            query,
            key,
            rows.positions,
            rows.count,
            rows.count if spans is None else spans.on(key.device),
        )
        factor, cap = (scale, 0.0) if softcap is None else (2.0 * scale / softcap, softcap)
        self.numbers = factor * LOG2E, cap * LOG2E, window or 0, self.cuts, key.shape[1]
        self.strides = query.stride(0), query.stride(1), key.stride(0), key.stride(1)
        self.options: dict[str, Any] = {
            "KV_HEADS": key.shape[0],
            "GROUP": group,
            "D": query.shape[2],
            "PADDED": padded(query.shape[2]),
            "VECTORS": how.vectors,
            "BLOCK": how.block,
            "SPANS": spans is not None,
            "WINDOW": window is not None,
            "SOFTCAP": softcap is not None,
            "UPCAST": upcast(query.dtype),
            "num_warps": how.warps,
            "num_stages": how.stages,
            **FUSED,
        }
        if how.registers is not None and self.once:
            self.options["maxnreg"] = how.registers

    def weight_sums(self, sums: torch.Tensor | None) -> torch.Tensor:
        """Sums of weights per key; without log-sum-exps every program finds those of its keys first."""
        query, key, _, count, _ = self.inputs
        out = query.new_zeros(self.slots * key.shape[0], key.shape[1], dtype=torch.float32)
        read, apart = (count, (0, 0, 0)) if sums is None else (sums, sums.stride())
        if self.parts:
            grid = (self.slots, key.shape[0], self.parts * self.cuts)
            with launching_on(key.device):
                columns_kernel[grid](
                    *self.inputs, read, out, *self.numbers, *self.strides, *apart,
                    LSE=sums is not None, ONCE=self.once, **self.options,
                )  # fmt: skip
        return out.sum(0)

    def _cuts(self, key: torch.Tensor, spans: Spans | None) -> int:
        """Into how many programs' work the keys of each span are divided, to keep the device busy."""
        longest = key.shape[1] if spans is None else spans.longest
        programs = max(self.parts * key.shape[0] * self.slots, 1)
        wanted = RESIDENT * processors(key.device) // programs
        return int(max(1, min(wanted, longest // SHORTEST)))


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(2) == 1 else tensor.contiguous()
