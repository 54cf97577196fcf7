"""Copy of a request's KV into chunks' tensors, rotated back and quantised to eight bits, in Triton.

A program quantises one head of one piece in one plane. A scale per channel depends on all tokens of the
piece: they are read twice, the second time from the L2 cache.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ragcachekit_kernels.launch import FUSED, launching_on
from ragcachekit_kernels.placement.assembly import (
    TritonAssembly,
    angles,
    constants,
    flag,
    load,
    rounded,
    store,
    turn,
)
from ragcachekit_kernels.placement.packing import Batch, batches, blocks, upload
from ragcachekit_kernels.placement.planes import Layout

TILE_BYTES = 8192
"""Bytes of the request's KV per step of a program."""

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


@triton.jit
def _stripped(kv, stride, slot, head, token, inside, cos, sin, turned, KV: tl.constexpr, D: tl.constexpr,
              PAIRS: tl.constexpr, OFFSET: tl.constexpr, INTERLEAVED: tl.constexpr, P_PAD: tl.constexpr,
              ALIGN: tl.constexpr, BY_HAND: tl.constexpr):  # fmt: skip
    """First and second dimensions of the pairs, ``[1, tokens, P_PAD]``, rounded to the type of the KV."""
    c, s = angles(cos, sin, slot, token, inside, turned, PAIRS, P_PAD, ALIGN)
    if INTERLEAVED:
        dim = OFFSET + tl.arange(0, 2 * P_PAD)[None, None, :]
        x = load(kv, stride, slot, head, token, dim, inside & (dim < OFFSET + 2 * PAIRS), KV, D, ALIGN)
        first, second = tl.split(tl.reshape(x, (1, token.shape[1], P_PAD, 2)))
    else:
        dim = OFFSET + tl.arange(0, P_PAD)[None, None, :]
        mask = inside & (dim < OFFSET + PAIRS)
        first = load(kv, stride, slot, head, token, dim, mask, KV, D, ALIGN)
        second = load(kv, stride, slot, head, token, dim + PAIRS, mask, KV, D, ALIGN)
    first, second = turn(first.to(tl.float32), second.to(tl.float32), c, s, turned)
    return rounded(first, KV, BY_HAND).to(tl.float32), rounded(second, KV, BY_HAND).to(tl.float32)


@triton.jit
def _rest(kv, stride, slot, head, token, inside, KV: tl.constexpr, D: tl.constexpr, PAIRS: tl.constexpr,
          OFFSET: tl.constexpr, D_PAD: tl.constexpr, ALIGN: tl.constexpr):  # fmt: skip
    """The dimensions that are not rotated, ``[1, tokens, D_PAD]`` with zeros in place of the others."""
    dim = tl.arange(0, D_PAD)[None, None, :]
    mask = inside & (dim < D) & ((dim < OFFSET) | (dim >= OFFSET + 2 * PAIRS))
    return load(kv, stride, slot, head, token, dim, mask, KV, D, ALIGN).to(tl.float32)


@triton.jit
def _greatest(x, axis: tl.constexpr):
    """Largest magnitude; infinite where there is a NaN, which ``max`` passes over."""
    return tl.max(tl.where(x == x, tl.abs(x), float("inf")), axis, keep_dims=True)


@triton.jit
def _divided(x, scale, CHUNK: tl.constexpr, LARGEST: tl.constexpr):
    """Within the range of eight bits, and integers where they are."""
    x = tl.math.div_rn(x, tl.broadcast_to(tl.maximum(scale, 1.1754943508222875e-38), x.shape))
    x = tl.minimum(tl.maximum(x, -LARGEST), LARGEST)
    if CHUNK == tl.int8:  # noqa: SIM300
        x = (x + 12582912.0) - 12582912.0  # 1.5 * 2^23: rounds to an integer, halves to even
    return x


@triton.jit(do_not_specialize=["blocks_at", "planes_at", "entries_at", "planes"])
def _quantise_kernel(
    table, blocks_at, planes_at, entries_at, planes,
    KV: tl.constexpr, CHUNK: tl.constexpr, LARGEST: tl.constexpr, D: tl.constexpr, PAIRS: tl.constexpr,
    OFFSET: tl.constexpr, INTERLEAVED: tl.constexpr, P_PAD: tl.constexpr, D_PAD: tl.constexpr,
    ALIGN: tl.constexpr, KV_STEP: tl.constexpr, CHUNK_STEP: tl.constexpr, T_TILE: tl.constexpr,
    BY_HAND: tl.constexpr,
):  # fmt: skip
    plane = tl.program_id(0) % planes
    block = table + blocks_at + tl.program_id(0) // planes * 4
    piece, slot, packed = tl.load(block), tl.load(block + 2), tl.load(block + 3)
    here = table + planes_at + plane * 4
    kv, kv_stride, cos, sin = tl.load(here), tl.load(here + 1), tl.load(here + 2), tl.load(here + 3)
    entry = table + entries_at + (piece * planes + plane) * 6
    chunk, chunk_stride = tl.load(entry), tl.load(entry + 1)
    kv_stride = tl.multiple_of(kv_stride, KV_STEP)
    chunk_stride = tl.multiple_of(chunk_stride, CHUNK_STEP)
    scale = tl.load(entry + 2).to(tl.pointer_type(tl.float32)) + tl.program_id(1) * tl.load(entry + 3)
    by_token, by_channel = flag(tl.load(entry + 4)), flag(tl.load(entry + 5))
    turned = flag(tl.where(packed % 2 != 0, cos, 0))
    count = packed // 2
    head = tl.program_id(1) + tl.zeros((1, 1, 1), tl.int32)
    token = tl.arange(0, T_TILE)[None, :, None]
    pair = tl.arange(0, P_PAD)[None, None, :]
    left = OFFSET + (2 * pair if INTERLEAVED else pair)
    right = left + (1 if INTERLEAVED else PAIRS)
    dim = tl.arange(0, D_PAD)[None, None, :]

    top_first = tl.zeros((1, 1, P_PAD), tl.float32)
    top_second = tl.zeros((1, 1, P_PAD), tl.float32)
    top_rest = tl.zeros((1, 1, D_PAD), tl.float32)
    for begin in range(0, count * tl.load(entry + 5), T_TILE):  # one scale per channel
        inside = begin + token < count
        if PAIRS > 0:
            first, second = _stripped(
                kv, kv_stride, slot + begin, head, token, inside, cos, sin, turned, KV, D, PAIRS, OFFSET,
                INTERLEAVED, P_PAD, ALIGN, BY_HAND,
            )  # fmt: skip
            top_first = tl.maximum(top_first, _greatest(first, 1))
            top_second = tl.maximum(top_second, _greatest(second, 1))
        if 2 * PAIRS < D:
            rest = _rest(
                kv, kv_stride, slot + begin, head, token, inside, KV, D, PAIRS, OFFSET, D_PAD, ALIGN
            )  # fmt: skip
            top_rest = tl.maximum(top_rest, _greatest(rest, 1))
    scale_first = tl.math.div_rn(top_first, tl.full((1, 1, P_PAD), LARGEST, tl.float32))
    scale_second = tl.math.div_rn(top_second, tl.full((1, 1, P_PAD), LARGEST, tl.float32))
    scale_rest = tl.math.div_rn(top_rest, tl.full((1, 1, D_PAD), LARGEST, tl.float32))
    others = (dim < D) & ((dim < OFFSET) | (dim >= OFFSET + 2 * PAIRS))
    tl.store(scale + left, scale_first, mask=by_channel & (pair < PAIRS))
    tl.store(scale + right, scale_second, mask=by_channel & (pair < PAIRS))
    tl.store(scale + dim, scale_rest, mask=by_channel & others)

    for begin in range(0, count, T_TILE):
        inside = begin + token < count
        top = tl.zeros((1, T_TILE, 1), tl.float32)
        if PAIRS > 0:
            first, second = _stripped(
                kv, kv_stride, slot + begin, head, token, inside, cos, sin, turned, KV, D, PAIRS, OFFSET,
                INTERLEAVED, P_PAD, ALIGN, BY_HAND,
            )  # fmt: skip
            top = tl.maximum(_greatest(first, 2), _greatest(second, 2))
        if 2 * PAIRS < D:
            rest = _rest(
                kv, kv_stride, slot + begin, head, token, inside, KV, D, PAIRS, OFFSET, D_PAD, ALIGN
            )  # fmt: skip
            top = tl.maximum(top, _greatest(rest, 2))
        of_token = tl.math.div_rn(top, tl.full((1, T_TILE, 1), LARGEST, tl.float32))
        tl.store(scale + begin + token, of_token, mask=by_token & inside)
        if PAIRS > 0:
            a = _divided(first, tl.where(by_token, of_token, scale_first), CHUNK, LARGEST)
            b = _divided(second, tl.where(by_token, of_token, scale_second), CHUNK, LARGEST)
            if INTERLEAVED:
                x = tl.reshape(tl.join(a, b), (1, T_TILE, 2 * P_PAD))
                at = OFFSET + tl.arange(0, 2 * P_PAD)[None, None, :]
                mask = inside & (at < OFFSET + 2 * PAIRS)
                store(chunk, chunk_stride, begin, head, token, at, mask, x, CHUNK, D, ALIGN, BY_HAND)
            else:
                mask = inside & (pair < PAIRS)
                store(chunk, chunk_stride, begin, head, token, left, mask, a, CHUNK, D, ALIGN, BY_HAND)
                store(chunk, chunk_stride, begin, head, token, right, mask, b, CHUNK, D, ALIGN, BY_HAND)
        if 2 * PAIRS < D:
            x = _divided(rest, tl.where(by_token, of_token, scale_rest), CHUNK, LARGEST)
            store(chunk, chunk_stride, begin, head, token, dim, inside & others, x, CHUNK, D, ALIGN, BY_HAND)


def disassemble(layout: Layout) -> None:
    """As :func:`ragcachekit_kernels.dispatch.disassemble`."""
    found = batches(layout)
    plain = [batch for batch in found if not batch.shape.chunk.scaled]
    if plain:
        TritonAssembly(layout, plain, out=True).run()
    for batch in found:
        if batch.shape.chunk.scaled:
            _quantise(batch, layout.planes[0].kv.device)


def quantise_constants(batch: Batch) -> dict[str, Any]:
    """Compile-time constants of the quantising kernel."""
    shared = constants(batch.shape)
    parts = 1 if 2 * shared["PAIRS"] in (0, shared["D"]) else 2  # pairs and the rest, each padded
    tokens = max(1, TILE_BYTES // (parts * shared["D_PAD"] * batch.shape.kv.itemsize))
    del shared["HEADS"]
    return shared | {"LARGEST": LARGEST[batch.shape.chunk.dtype], "T_TILE": tokens}


def _quantise(batch: Batch, device: torch.device) -> None:
    listed = blocks(batch.places)
    table, at = upload((listed, batch.addresses, batch.entries), device)
    grid = (len(listed) * len(batch.planes), batch.shape.chunk.heads)
    named = quantise_constants(batch)
    with launching_on(device):
        _quantise_kernel[grid](table, *at, len(batch.planes), **named, num_warps=4, **FUSED)
