"""Rows of chunks move by what the recomputed rows like them were moved by, in Triton.

A program moves some rows of one head on one side, keys or values, over all recomputed rows of their chunk.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ragcachekit_kernels.arguments import Groups, Rotation
from ragcachekit_kernels.assembly import paired, rounded
from ragcachekit_kernels.launch import FUSED, interpreted, launching_on, padded

TILE, ROWS = 4096, 16
"""Elements of the rows that a program moves, and the recomputed rows that it reads at a time."""


@triton.jit
def _move_kernel(
    out, by, moves, alike, cos, sin, starts, stops, firsts, lasts, out_head, out_row, by_head, by_row,
    moves_head, alike_head, D: tl.constexpr, D_PAD: tl.constexpr, BY: tl.constexpr, BY_PAD: tl.constexpr,
    PAIRS: tl.constexpr, OFFSET: tl.constexpr, INTERLEAVED: tl.constexpr, TOKENS: tl.constexpr,
    ROWS: tl.constexpr, BY_HAND: tl.constexpr
):  # fmt: skip
    block, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    token = tl.load(starts + block) + tl.arange(0, TOKENS)
    inside = (token < tl.load(stops + block))[:, None]
    first, last = tl.load(firsts + block), tl.load(lasts + block)
    at = token.to(tl.int64)[:, None]

    wide = tl.arange(0, BY_PAD)[None, :]
    x = tl.load(by + head * by_head + at * by_row + wide, mask=inside & (wide < BY), other=0.0).to(tl.float32)
    length = tl.maximum(tl.sqrt(tl.sum(x * x, 1)), 1e-12)

    dim = tl.arange(0, D_PAD)[None, :]
    within, is_first, pair, partner = paired(dim, PAIRS, OFFSET, INTERLEAVED)
    turned = (within >= 0) & (within < 2 * PAIRS)

    total = tl.zeros([TOKENS], dtype=tl.float32)
    own = tl.zeros([TOKENS, D_PAD], dtype=tl.float32)
    other = tl.zeros([TOKENS, D_PAD], dtype=tl.float32)
    for begin in range(first, last, ROWS):
        row = begin + tl.arange(0, ROWS)
        known = (row < last)[:, None]
        of_row = alike + head * alike_head + row[:, None] * BY
        like = tl.load(of_row + wide, mask=known & (wide < BY), other=0.0)
        scores = tl.dot(x, tl.trans(like), input_precision="ieee") / length[:, None]
        weights = tl.where((row < last)[None, :], tl.exp(scores), 0.0)
        total += tl.sum(weights, 1)
        of_row = moves + head * moves_head + row[:, None] * D
        move = tl.load(of_row + dim, mask=known & (dim < D), other=0.0)
        own += tl.dot(weights, move, input_precision="ieee")
        if PAIRS > 0:
            move = tl.load(of_row + partner, mask=known & turned, other=0.0)
            other += tl.dot(weights, move, input_precision="ieee")
    if PAIRS > 0:
        c = tl.load(cos + at * PAIRS + pair, mask=inside & turned, other=1.0)
        s = tl.load(sin + at * PAIRS + pair, mask=inside & turned, other=0.0)
        own = own * c + tl.where(is_first, -other, other) * s
    to = out + head * out_head + at * out_row + dim
    mask = inside & (dim < D)
    moved = tl.load(to, mask=mask, other=0.0).to(tl.float32) + own / total[:, None]
    tl.store(to, rounded(moved, out.dtype.element_ty, BY_HAND), mask=mask)


def move_alike(
    sides: tuple[Tensor, Tensor],
    moves: tuple[Tensor, Tensor],
    alike: Tensor,
    by: int,
    groups: Groups,
    rotations: tuple[Rotation | None, Rotation | None],
) -> None:
    """As :func:`ragcachekit_kernels.dispatch.move_alike`: one launch a side, the one compared by last.

    If the second launch is refused, the first side is as before.
    """
    tokens = max(16, TILE // padded(max(side.shape[2] for side in sides)))
    blocks, alike = groups.blocks(alike.device, tokens), alike.contiguous()
    before = sides[1 - by].clone()
    try:
        for side in (1 - by, by):
            _launch(sides[side], sides[by], moves[side].contiguous(), alike, blocks, rotations[side], tokens)
    except Exception:
        sides[1 - by].copy_(before)
        raise


def _launch(
    out: Tensor,
    by: Tensor,
    moves: Tensor,
    alike: Tensor,
    blocks: Tensor,
    rotation: Rotation | None,
    tokens: int,
) -> None:
    heads, _, dim = out.shape
    cos, sin = (blocks, blocks) if rotation is None else (rotation.cos, rotation.sin)
    with launching_on(out.device):
        _move_kernel[(blocks.shape[1], heads)](
            out, by, moves, alike, cos, sin, *blocks.unbind(0), *out.stride()[:2], *by.stride()[:2],
            moves.stride(0), alike.stride(0), D=dim, D_PAD=padded(dim), BY=by.shape[2],
            BY_PAD=padded(by.shape[2]), PAIRS=0 if rotation is None else cos.shape[1],
            OFFSET=rotation.offset if rotation else 0, INTERLEAVED=bool(rotation and rotation.interleaved),
            TOKENS=tokens, ROWS=ROWS, BY_HAND=interpreted(), num_warps=4, num_stages=2, **FUSED,
        )  # fmt: skip
