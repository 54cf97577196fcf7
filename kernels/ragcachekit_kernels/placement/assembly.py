"""Rotating copy of chunks' tensors into a request's KV and back, in Triton: one launch for all layers.

A program moves one block of tokens of one piece in one plane, the keys or the values of a layer. Up to
``HEADS`` heads share the cosines and sines. It reads addresses from the tables of
``placement.packing``. A row has three parts: first dimensions of the rotated pairs, second ones,
and the rest.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from ragcachekit_kernels.backend import interpreted
from ragcachekit_kernels.launch import FUSED, launching_on
from ragcachekit_kernels.placement.packing import Batch, Shape, batches, blocks, skipped, upload
from ragcachekit_kernels.placement.planes import Layout, Numbers

TILE_BYTES = 16384
"""Bytes of the request's KV per program: 8 loads of 16 bytes by each of 128 threads."""

HEADS = 8
"""Maximum number of heads of a tile."""

GROUP = 512
"""Blocks of one plane before those of the next: cosines and sines stay in the L2 cache (2 MB for 4,096
tokens). Concurrent programs also access fewer pages."""

TYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.int8: tl.int8,
    torch.float8_e4m3fn: tl.float8e4nv,
}


@triton.jit
def flag(number):
    """``[1, 1, 1]``: whether a number is not 0 (the interpreter cannot combine a mask with a scalar)."""
    return tl.full((1, 1, 1), number, tl.int64) != 0


@triton.jit
def load(address, stride, row, heads, tokens, dims, mask, TYPE: tl.constexpr, D: tl.constexpr,
          ALIGN: tl.constexpr):  # fmt: skip
    """Rows ``row + tokens`` of ``[heads, tokens, D]``, known by its address; 0 outside of the mask."""
    at = tl.multiple_of(address.to(tl.pointer_type(TYPE)), ALIGN) + heads * stride + (row + tokens) * D + dims
    return tl.load(at, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def rounded(x, TYPE: tl.constexpr, BY_HAND: tl.constexpr):
    """Float32 ``x`` as ``TYPE``.

    BY_HAND for the interpreter, which cuts bfloat16 off and loses the carry of some e4m3 numbers: there
    the number is made one that needs no rounding first.
    """
    if BY_HAND and TYPE == tl.bfloat16:  # noqa: SIM300
        bits = x.to(tl.int32, bitcast=True)
        even = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        x = tl.where(tl.abs(x) < float("inf"), even, bits).to(tl.float32, bitcast=True)
    if BY_HAND and TYPE == tl.float8e4nv:  # noqa: SIM300
        exponent = tl.maximum((x.to(tl.int32, bitcast=True) >> 23) & 255, 121)  # below 2^-6: subnormal
        step = ((exponent - 3) << 23).to(tl.float32, bitcast=True)
        x = (x + 12582912.0 * step) - 12582912.0 * step
    return x.to(TYPE)


@triton.jit
def store(address, stride, row, heads, tokens, dims, mask, x, TYPE: tl.constexpr, D: tl.constexpr,
           ALIGN: tl.constexpr, BY_HAND: tl.constexpr):  # fmt: skip
    """The reverse of ``load``, rounded to the tensor's type."""
    at = tl.multiple_of(address.to(tl.pointer_type(TYPE)), ALIGN) + heads * stride + (row + tokens) * D + dims
    tl.store(at, rounded(x, TYPE, BY_HAND), mask=mask)


@triton.jit
def _scaled(x, entry, row, heads, tokens, dims, inside, SCALED: tl.constexpr, HEADS: tl.constexpr,
            D: tl.constexpr, ALIGN: tl.constexpr):  # fmt: skip
    """In float32; multiplied by one scale per token or per channel where there are scales."""
    x = x.to(tl.float32)
    if SCALED:
        scale = tl.multiple_of(tl.load(entry + 2).to(tl.pointer_type(tl.float32)), ALIGN)
        by_token, by_channel = flag(tl.load(entry + 4)), flag(tl.load(entry + 5))
        of_token = scale + heads * tl.load(entry + 3) + (row + tokens)
        x *= tl.load(of_token, mask=inside & by_token, other=1.0)
        mask = (heads < HEADS) & (dims < D) & by_channel
        x *= tl.load(scale + heads * D + dims, mask=mask, other=1.0)
    return x


@triton.jit
def angles(cos, sin, slot, tokens, inside, turned, PAIRS: tl.constexpr, P_PAD: tl.constexpr,
           ALIGN: tl.constexpr):  # fmt: skip
    """``[1, tokens, P_PAD]`` cosines and sines; 1 and 0, without a load, where nothing turns."""
    pair = tl.arange(0, P_PAD)[None, None, :]
    at = (slot + tokens) * PAIRS + pair
    mask = inside & (pair < PAIRS) & turned
    cos = tl.multiple_of(cos.to(tl.pointer_type(tl.float32)), ALIGN)
    sin = tl.multiple_of(sin.to(tl.pointer_type(tl.float32)), ALIGN)
    c = tl.load(cos + at, mask=mask, other=1.0, eviction_policy="evict_last")
    s = tl.load(sin + at, mask=mask, other=0.0, eviction_policy="evict_last")
    return c, s


@triton.jit
def turn(first, second, cos, sin, turned):
    """Pairs rotated where ``turned``, else as they are (infinities too)."""
    a = tl.where(turned, first * cos - second * sin, first)
    b = tl.where(turned, second * cos + first * sin, second)
    return a, b


@triton.jit(
    do_not_specialize=[
        "blocks_at", "planes_at", "entries_at", "skip_at", "first_plane", "planes", "all_planes", "blocks"
    ]
)  # fmt: skip
def _move_kernel(
    table, blocks_at, planes_at, entries_at, skip_at, first_plane, planes, all_planes, blocks,
    KV: tl.constexpr, CHUNK: tl.constexpr, SCALED: tl.constexpr, SKIP: tl.constexpr, OUT: tl.constexpr,
    HEADS: tl.constexpr, D: tl.constexpr, PAIRS: tl.constexpr, OFFSET: tl.constexpr,
    INTERLEAVED: tl.constexpr, P_PAD: tl.constexpr, D_PAD: tl.constexpr, ALIGN: tl.constexpr,
    KV_STEP: tl.constexpr, CHUNK_STEP: tl.constexpr, KV_BYTES: tl.constexpr, H_TILE: tl.constexpr,
    T_TILE: tl.constexpr, GROUP: tl.constexpr, BY_HAND: tl.constexpr,
):  # fmt: skip
    """Programs count through the blocks of a group, then through planes, then through groups."""
    group = tl.program_id(0) // (GROUP * planes)
    within = tl.program_id(0) % (GROUP * planes)
    size = tl.minimum(blocks - group * GROUP, GROUP)
    plane = first_plane + within // size
    block = table + blocks_at + (group * GROUP + within % size) * 4
    piece, row, slot, packed = tl.load(block), tl.load(block + 1), tl.load(block + 2), tl.load(block + 3)
    here = table + planes_at + plane * 4
    kv, kv_stride, cos, sin = tl.load(here), tl.load(here + 1), tl.load(here + 2), tl.load(here + 3)
    entry = table + entries_at + (piece * all_planes + plane) * (6 if SCALED else 2)
    chunk, chunk_stride = tl.load(entry), tl.load(entry + 1)
    turns = tl.where(packed % 2 != 0, cos, 0)
    turned = flag(turns)
    at_home = chunk == 0  # the piece lies where it belongs: read from there, write only what turns
    count = tl.where(at_home & (turns == 0), 0, packed // 2)
    chunk = tl.where(at_home, kv + (slot - row) * (D * KV_BYTES), chunk)
    chunk_stride = tl.where(at_home, kv_stride, chunk_stride)
    kv_stride = tl.multiple_of(kv_stride, KV_STEP)
    chunk_stride = tl.multiple_of(chunk_stride, CHUNK_STEP)

    head = tl.program_id(1) * H_TILE + tl.arange(0, H_TILE)[:, None, None]
    token = tl.arange(0, T_TILE)[None, :, None]
    inside = token < count
    if SKIP:
        flags = (table + skip_at).to(tl.pointer_type(tl.int8)) + slot
        inside = inside & (tl.load(flags + token, mask=inside, other=1) == 0)
    inside_heads = inside & (head < HEADS)
    if OUT:
        source, source_stride, source_row, target, target_stride, target_row = (
            kv, kv_stride, slot, chunk, chunk_stride, row
        )  # fmt: skip
    else:
        source, source_stride, source_row, target, target_stride, target_row = (
            chunk, chunk_stride, row, kv, kv_stride, slot
        )  # fmt: skip
    READ: tl.constexpr = KV if OUT else CHUNK
    WRITE: tl.constexpr = CHUNK if OUT else KV

    if PAIRS > 0:
        c, s = angles(cos, sin, slot, token, inside, turned, PAIRS, P_PAD, ALIGN)
        if INTERLEAVED:
            dim = OFFSET + tl.arange(0, 2 * P_PAD)[None, None, :]
            mask = inside_heads & (dim < OFFSET + 2 * PAIRS)
            x = load(source, source_stride, source_row, head, token, dim, mask, READ, D, ALIGN)
            x = _scaled(x, entry, row, head, token, dim, inside_heads, SCALED, HEADS, D, ALIGN)
            first, second = tl.split(tl.reshape(x, (H_TILE, T_TILE, P_PAD, 2)))
            first, second = turn(first, second, c, s, turned)
            x = tl.reshape(tl.join(first, second), (H_TILE, T_TILE, 2 * P_PAD))
            store(target, target_stride, target_row, head, token, dim, mask, x, WRITE, D, ALIGN, BY_HAND)
        else:
            dim = OFFSET + tl.arange(0, P_PAD)[None, None, :]
            mask = inside_heads & (dim < OFFSET + PAIRS)
            first = load(source, source_stride, source_row, head, token, dim, mask, READ, D, ALIGN)
            second = load(source, source_stride, source_row, head, token, dim + PAIRS, mask, READ, D, ALIGN)
            first = _scaled(first, entry, row, head, token, dim, inside_heads, SCALED, HEADS, D, ALIGN)
            second = _scaled(
                second, entry, row, head, token, dim + PAIRS, inside_heads, SCALED, HEADS, D, ALIGN
            )
            first, second = turn(first, second, c, s, turned)
            store(target, target_stride, target_row, head, token, dim, mask, first, WRITE, D, ALIGN, BY_HAND)
            dim += PAIRS
            store(target, target_stride, target_row, head, token, dim, mask, second, WRITE, D, ALIGN, BY_HAND)
    if 2 * PAIRS < D:
        dim = tl.arange(0, D_PAD)[None, None, :]
        mask = inside_heads & (dim < D) & ((dim < OFFSET) | (dim >= OFFSET + 2 * PAIRS))
        x = load(source, source_stride, source_row, head, token, dim, mask, READ, D, ALIGN)
        x = _scaled(x, entry, row, head, token, dim, inside_heads, SCALED, HEADS, D, ALIGN)
        store(target, target_stride, target_row, head, token, dim, mask, x, WRITE, D, ALIGN, BY_HAND)


def constants(shape: Shape) -> dict[str, Any]:
    """Compile-time constants of a kernel for this shape."""
    kv_bytes, chunk_bytes = shape.kv.itemsize, shape.chunk.dtype.itemsize
    return {
        "KV": TYPES[shape.kv],
        "CHUNK": TYPES[shape.chunk.dtype],
        "HEADS": shape.chunk.heads,
        "D": shape.chunk.dim,
        "PAIRS": shape.pairs,
        "OFFSET": shape.offset,
        "INTERLEAVED": shape.interleaved,
        "P_PAD": _power(shape.pairs),
        "D_PAD": _power(shape.chunk.dim),
        "ALIGN": 16 if shape.aligned else 1,
        "KV_STEP": 16 // kv_bytes if shape.aligned else 1,
        "CHUNK_STEP": 16 // chunk_bytes if shape.aligned else 1,
        "BY_HAND": interpreted(),
    }


def tile(shape: Shape) -> tuple[int, int]:
    """Heads and tokens of a program's tile."""
    heads = min(_power(shape.chunk.heads), HEADS)
    size = TILE_BYTES // 2 if shape.interleaved else TILE_BYTES  # the shuffle costs registers
    return heads, max(1, size // (heads * _power(shape.chunk.dim) * shape.kv.itemsize))


class _Launch:
    """Launch of one batch."""

    def __init__(self, batch: Batch, listed: Numbers, out: bool) -> None:
        self.batch, self.listed = batch, listed
        heads, tokens = tile(batch.shape)
        self.head_tiles = -(-batch.shape.chunk.heads // heads)
        self.constants = constants(batch.shape) | {
            "SCALED": batch.shape.chunk.scaled,
            "KV_BYTES": batch.shape.kv.itemsize,
            "OUT": out,
            "H_TILE": heads,
            "T_TILE": tokens,
            "GROUP": GROUP,
        }

    def run(self, table: torch.Tensor, at: Sequence[int], skip_at: int | None, first: int, last: int) -> None:
        """Move the planes ``first .. last - 1`` of the layout that are in this batch."""
        begin, end = bisect_left(self.batch.planes, first), bisect_left(self.batch.planes, last)
        programs = len(self.listed) * (end - begin)
        if not programs:
            return
        with launching_on(table.device):
            _move_kernel[(programs, self.head_tiles)](
                table, *at, skip_at or 0, begin, end - begin, len(self.batch.planes), len(self.listed),
                **self.constants, SKIP=skip_at is not None, num_warps=4, **FUSED,
            )  # fmt: skip


class TritonAssembly:
    """Layout with its tables on the device.

    ``found`` are the batches to move, by default all; with ``out`` they move from the request's KV into the
    chunks' tensors.
    """

    def __init__(self, layout: Layout, found: Sequence[Batch] | None = None, *, out: bool = False) -> None:
        found = batches(layout) if found is None else found
        self._layout = layout  # keeps the tensors whose addresses are in the table
        hidden = skipped(layout)
        self._launches = [
            _Launch(batch, blocks(batch.places, tile(batch.shape)[1], hidden), out) for batch in found
        ]
        parts = [p for one in self._launches for p in (one.listed, one.batch.addresses, one.batch.entries)]
        if hidden is not None:
            parts.append(hidden.view(np.int64))
        self._table, self._starts = upload(parts, layout.planes[0].kv.device)
        self._skip_at = None if hidden is None else self._starts[-1]

    def run(self, first: int = 0, last: int | None = None) -> None:
        """Move planes ``first .. last - 1`` on the current stream."""
        last = len(self._layout.planes) if last is None else last
        for number, one in enumerate(self._launches):
            one.run(self._table, self._starts[3 * number : 3 * number + 3], self._skip_at, first, last)


def _power(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()
