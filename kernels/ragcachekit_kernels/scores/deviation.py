"""Squared deviation of keys or values per row, and sums over spans, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ragcachekit_kernels.launch import FUSED, dense, launching_on, padded
from ragcachekit_kernels.rows import DeviceRows, Spans

ROWS = 8
"""Rows per program: 32 KiB of either tensor for 8 heads of 128 dimensions."""

BLOCK = 1024
"""Values that one step of the loop adds."""


@triton.jit
def _deviation_kernel(
    new, old, positions, count, out, new_head, new_row, old_head, old_row, HEADS: tl.constexpr,
    D: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < tl.load(count)
    at = tl.load(positions + row, mask=inside, other=0)
    dim = tl.arange(0, PADDED)
    mask = inside[:, None]
    if D != PADDED:
        mask = mask & (dim < D)[None, :]
    to_new = new + row.to(tl.int64)[:, None] * new_row + dim[None, :]
    to_old = old + at.to(tl.int64)[:, None] * old_row + dim[None, :]
    acc = tl.zeros([ROWS, PADDED], tl.float32)
    for head in tl.static_range(HEADS):
        a = tl.load(to_new + head * new_head, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(to_old + head * old_head, mask=mask, other=0.0).to(tl.float32)
        acc += (a - b) * (a - b)
    tl.store(out + row, tl.sum(acc, 1), mask=inside)


@triton.jit
def _span_sums_kernel(values, spans, out, BLOCK: tl.constexpr):
    span = tl.program_id(0)
    stop = tl.load(spans + 2 * span + 1)
    acc = tl.zeros([BLOCK], tl.float64)
    for start in tl.range(tl.load(spans + 2 * span), stop, BLOCK):
        at = start + tl.arange(0, BLOCK)
        acc += tl.load(values + at, mask=at < stop, other=0.0).to(tl.float64)
    tl.store(out + span, tl.sum(acc, 0))


def kv_deviation(new: torch.Tensor, old: torch.Tensor, rows: DeviceRows) -> torch.Tensor:
    """As :func:`ragcachekit_kernels.dispatch.kv_deviation`; undefined in rows from the count on."""
    new, old = dense(new), dense(old)
    out = torch.empty(rows.room, dtype=torch.float32, device=new.device)
    with launching_on(new.device):
        _deviation_kernel[(triton.cdiv(rows.room, ROWS),)](
            new, old, rows.positions, rows.count, out, *new.stride()[:2], *old.stride()[:2],
            HEADS=new.shape[0], D=new.shape[2], PADDED=padded(new.shape[2]), ROWS=ROWS, num_warps=4, **FUSED,
        )  # fmt: skip
    return out


def span_sums(values: torch.Tensor, spans: Spans) -> torch.Tensor:
    """As :func:`ragcachekit_kernels.dispatch.span_sums`."""
    out = torch.empty(len(spans), dtype=torch.float64, device=values.device)
    if len(spans):
        table = spans.on(values.device)
        values = values.contiguous()
        with launching_on(values.device):
            _span_sums_kernel[(len(spans),)](values, table, out, BLOCK=BLOCK, num_warps=4, **FUSED)
    return out
