"""Second step of split attention: one output of those over parts of the keys."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ragcachekit_kernels.launch import FUSED, launching_on, padded

ROWS = 8
"""Query vectors per program."""


@triton.jit(do_not_specialize=["splits", "room"])
def _merge_kernel(
    parts, part_lse, out, lse, count, sinks, splits, room, HEADS: tl.constexpr, DV: tl.constexpr,
    DV_PAD: tl.constexpr, BLOCK: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """Outputs of the splits weighted by their log-sum-exps (to base 2); sinks are counted here, once."""
    flat = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = flat < tl.load(count) * HEADS
    dim = tl.arange(0, DV_PAD)
    mask = inside[:, None]
    if DV != DV_PAD:
        mask = mask & (dim < DV)[None, :]
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    if SINKS:
        top = tl.load(sinks + flat % HEADS).to(tl.float32) * 1.4426950408889634
        total += 1.0
    acc = tl.zeros([BLOCK, DV_PAD], tl.float32)
    for split in tl.range(0, splits):
        place = tl.cast(split, tl.int64) * room * HEADS + flat
        part = tl.load(part_lse + place, mask=inside, other=0.0)
        values = tl.load(parts + place[:, None] * DV + dim[None, :], mask=mask, other=0.0)
        higher = tl.maximum(top, part)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        shrink = tl.exp2(top - base)
        weight = tl.exp2(part - base)
        total = total * shrink + weight
        acc = acc * shrink[:, None] + values * weight[:, None]
        top = higher
    place = flat.to(tl.int64)
    if LSE:
        tl.store(lse + place, (top + tl.log2(total)) * 0.6931471805599453, mask=inside)
    acc = acc / total[:, None]
    tl.store(out + place[:, None] * DV + dim[None, :], acc.to(out.dtype.element_ty), mask=mask)


def merge(
    parts: torch.Tensor,
    part_lse: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    count: torch.Tensor,
    sinks: torch.Tensor | None,
) -> None:
    """Merged attention, written to ``out`` ``[rows, heads, value_dim]`` and ``lse`` ``[rows, heads]``.

    ``parts`` ``[splits, rows, heads, value_dim]`` are float32 outputs, each by its own softmax. ``part_lse``
    ``[splits, rows, heads]`` are to base 2, minus infinity where a row sees no key of a part. Rows from
    ``count`` on are not written. ``sinks``, natural logits ``[heads]``, are in no part and join here.
    """
    splits, room, heads, value_dim = parts.shape
    with launching_on(parts.device):
        _merge_kernel[(triton.cdiv(room * heads, ROWS),)](
            parts, part_lse, out, lse, count, sinks, splits, room,
            HEADS=heads, DV=value_dim, DV_PAD=padded(value_dim), BLOCK=ROWS,
            SINKS=sinks is not None, LSE=lse is not None, num_warps=4, **FUSED,
        )  # fmt: skip
