"""Scatter of computed rows into a request's KV, in Triton: one launch for keys and values."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ragcachekit_kernels.launch import FUSED, dense, launching_on, padded
from ragcachekit_kernels.placement.assembly import TYPES
from ragcachekit_kernels.rows import DeviceRows, KVTable

TILE_BYTES = 8192
"""Bytes of keys or values per program: small, since a forward has few rows for many programs."""


@triton.jit
def _rows(source, head_stride, row_stride, into, into_stride, head, row, at, inside, D: tl.constexpr,
          PADDED: tl.constexpr):  # fmt: skip
    dim = tl.arange(0, PADDED)[None, :]
    mask = inside[:, None] & (dim < D)
    head = head.to(tl.int64)
    x = tl.load(source + head * head_stride + row[:, None] * row_stride + dim, mask=mask)
    tl.store(into + head * into_stride + at[:, None] * D + dim, x.to(into.dtype.element_ty), mask=mask)


@triton.jit
def _slots(positions, count, room, TILE: tl.constexpr):
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = row < tl.minimum(tl.load(count), room)
    return row.to(tl.int64), tl.load(positions + row, mask=inside, other=0).to(tl.int64), inside


@triton.jit(do_not_specialize=["room"])
def _scatter_kernel(
    key, value, into_key, into_value, positions, count, room, key_head, key_row, value_head, value_row,
    into_key_head, into_value_head, D: tl.constexpr, DV: tl.constexpr, D_PAD: tl.constexpr,
    DV_PAD: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row, at, inside = _slots(positions, count, room, TILE)
    head = tl.program_id(1)
    _rows(key, key_head, key_row, into_key, into_key_head, head, row, at, inside, D, D_PAD)
    _rows(value, value_head, value_row, into_value, into_value_head, head, row, at, inside, DV, DV_PAD)


@triton.jit(do_not_specialize=["room", "layer"])
def _scatter_at_kernel(
    key, value, table, layer, positions, count, room, key_head, key_row, value_head, value_row,
    KV: tl.constexpr, STEP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, D_PAD: tl.constexpr,
    DV_PAD: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row, at, inside = _slots(positions, count, room, TILE)
    head = tl.program_id(1)
    entry = table + layer * 4
    into_key = tl.multiple_of(tl.load(entry).to(tl.pointer_type(KV)), 16)
    into_value = tl.multiple_of(tl.load(entry + 1).to(tl.pointer_type(KV)), 16)
    into_key_head = tl.multiple_of(tl.load(entry + 2), STEP)
    into_value_head = tl.multiple_of(tl.load(entry + 3), STEP)
    _rows(key, key_head, key_row, into_key, into_key_head, head, row, at, inside, D, D_PAD)
    _rows(value, value_head, value_row, into_value, into_value_head, head, row, at, inside, DV, DV_PAD)


def scatter(
    key: torch.Tensor,
    value: torch.Tensor,
    into_key: torch.Tensor,
    into_value: torch.Tensor,
    rows: DeviceRows,
) -> None:
    """As :func:`ragcachekit_kernels.dispatch.scatter`."""
    key, value = dense(key), dense(value)
    sizes, grid = _sizes(key, value, rows)
    with launching_on(key.device):
        _scatter_kernel[grid](
            key, value, into_key, into_value, rows.positions, rows.count, rows.room, *key.stride()[:2],
            *value.stride()[:2], into_key.stride(0), into_value.stride(0), **sizes, num_warps=4, **FUSED,
        )  # fmt: skip


def scatter_at(key: torch.Tensor, value: torch.Tensor, table: KVTable, layer: int, rows: DeviceRows) -> None:
    """As :func:`ragcachekit_kernels.dispatch.scatter_at`."""
    key, value = dense(key), dense(value)
    sizes, grid = _sizes(key, value, rows)
    with launching_on(key.device):
        _scatter_at_kernel[grid](
            key, value, table.entries, layer, rows.positions, rows.count, rows.room, *key.stride()[:2],
            *value.stride()[:2], KV=TYPES[table.dtype], STEP=16 // table.dtype.itemsize, **sizes,
            num_warps=4, **FUSED,
        )  # fmt: skip


def _sizes(
    key: torch.Tensor, value: torch.Tensor, rows: DeviceRows
) -> tuple[dict[str, int], tuple[int, int]]:
    heads, _, dim = key.shape
    widest = max(padded(dim), padded(value.shape[2]))
    tile = max(1, TILE_BYTES // (widest * key.element_size()))
    sizes = {
        "D": dim,
        "DV": value.shape[2],
        "D_PAD": padded(dim),
        "DV_PAD": padded(value.shape[2]),
        "TILE": tile,
    }
    return sizes, (-(-rows.room // tile), heads)
