"""Assembly in Triton: rows of chunk KV go to their positions in a request's cache, rotated to them.

A program moves some rows of one head. Each element of a rotated pair is computed from both of them; the
second load of a row comes from the L1 cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ragcachekit_kernels.arguments import Places, Rotation
from ragcachekit_kernels.launch import FUSED, dense, interpreted, launching_on, padded

TILE = 4096
"""Elements per program: 32 for each of 128 threads."""


@triton.jit
def rounded(x, TYPE: tl.constexpr, BY_HAND: tl.constexpr):
    """Float32 ``x`` as ``TYPE``; BY_HAND for the interpreter, which cuts off the digits of bfloat16."""
    if BY_HAND and TYPE == tl.bfloat16:  # noqa: SIM300
        bits = x.to(tl.int32, bitcast=True)
        even = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        x = tl.where(tl.abs(x) < float("inf"), even, bits).to(tl.float32, bitcast=True)
    return x.to(TYPE)


@triton.jit
def paired(dim, PAIRS: tl.constexpr, OFFSET: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Per dimension: place in the rotated part, whether it is first of its pair, the pair, its partner."""
    within = dim - OFFSET
    if INTERLEAVED:
        is_first = within % 2 == 0
        pair = within // 2
        partner = tl.where(is_first, dim + 1, dim - 1)
    else:
        is_first = within < PAIRS
        pair = tl.where(is_first, within, within - PAIRS)
        partner = tl.where(is_first, dim + PAIRS, dim - PAIRS)
    return within, is_first, pair, partner


@triton.jit(do_not_specialize=["rows"])
def _assemble_kernel(
    source, out, cos, sin, slots, turns, rows, source_head, source_row, out_head, out_row,
    D: tl.constexpr, D_PAD: tl.constexpr, PAIRS: tl.constexpr, OFFSET: tl.constexpr,
    INTERLEAVED: tl.constexpr, ROWS: tl.constexpr, BY_HAND: tl.constexpr
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    dim = tl.arange(0, D_PAD)[None, :]
    inside = row < rows
    mask = inside[:, None] & (dim < D)
    of_row = source + head * source_head + row.to(tl.int64)[:, None] * source_row
    x = tl.load(of_row + dim, mask=mask, other=0.0).to(tl.float32)
    if PAIRS > 0:
        within, is_first, pair, partner = paired(dim, PAIRS, OFFSET, INTERLEAVED)
        at = tl.load(turns + row, mask=inside, other=-1)[:, None]
        turned = mask & (at >= 0) & (within >= 0) & (within < 2 * PAIRS)
        y = tl.load(of_row + partner, mask=turned, other=0.0).to(tl.float32)
        c = tl.load(cos + at * PAIRS + pair, mask=turned, other=1.0)
        s = tl.load(sin + at * PAIRS + pair, mask=turned, other=0.0)
        x = tl.where(turned, x * c + tl.where(is_first, -y, y) * s, x)
    slot = tl.load(slots + row, mask=inside, other=0).to(tl.int64)
    to = out + head * out_head + slot[:, None] * out_row + dim
    tl.store(to, rounded(x, out.dtype.element_ty, BY_HAND), mask=mask)


def assemble(out: Tensor, tensors: Sequence[Tensor], places: Places, rotation: Rotation | None) -> None:
    """As :func:`ragcachekit_kernels.dispatch.assemble`: one launch for all pieces of the same type."""
    types: dict[torch.dtype, list[int]] = {}
    for number, tensor in enumerate(tensors):
        types.setdefault(tensor.dtype, []).append(number)
    for numbers in types.values():
        parts = [tensors[number] for number in numbers]
        source = torch.cat(parts, 1) if len(parts) > 1 else dense(parts[0])
        _launch(out, source, places.rows(out.device, tuple(numbers)), rotation)


def _launch(out: Tensor, source: Tensor, places: Tensor, rotation: Rotation | None) -> None:
    heads, rows, dim = source.shape
    tile = max(1, TILE // padded(dim))
    cos, sin = (places, places) if rotation is None else (rotation.cos, rotation.sin)
    with launching_on(out.device):
        _assemble_kernel[(triton.cdiv(rows, tile), heads)](
            source, out, cos, sin, *places.unbind(0), rows, *source.stride()[:2], *out.stride()[:2],
            D=dim, D_PAD=padded(dim),
            PAIRS=0 if rotation is None else cos.shape[1], OFFSET=rotation.offset if rotation else 0,
            INTERLEAVED=bool(rotation and rotation.interleaved), ROWS=tile, BY_HAND=interpreted(),
            num_warps=4, **FUSED,
        )  # fmt: skip
