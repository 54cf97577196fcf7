"""Kept rows of a chunk are corrected by what its recomputed rows show (our own; docs/selection.md).

What precedes a chunk moves its tokens in similar ways. A row that is recomputed shows how far it moved from
what was stored; rows of the same chunk with similar values are moved by a part of that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import normalize

from ragcachekit.plan.link_plan import LinkPlan
from ragcachekit.policies.base import CorrectingPolicy, LayerwisePolicy
from ragcachekit_kernels.dispatch import Rotation, rotate

Indices = npt.NDArray[np.int64]

SHARPNESS = 5.0
"""Factor on the cosines of rows, before the softmax over the recomputed rows of a chunk."""

STRENGTHS = 0.45, 0.3
"""Part of the deviation that kept rows are moved by: of keys, of values; fitted on SmolLM2 and SQuAD."""

Correct = Callable[[Tensor, Tensor, Tensor, Tensor], None]
"""Corrects one layer in place: keys and values ``[kv_heads, tokens, dim]``, and those of the computed rows,
``[kv_heads, rows, dim]``, which are not in place yet."""


class Correction:
    """The kept and recomputed rows of each chunk of one prompt that has both."""

    def __init__(
        self, chunks: Sequence[tuple[Indices, Indices]], rows: Indices, device: torch.device
    ) -> None:
        # Chunks are padded to one shape: a layer takes one batch of operations however many chunks there are.
        # Padding of the kept rows is a recomputed row, which is overwritten afterwards.
        recomputed, is_row = _padded([again for again, _ in chunks], None)
        kept, _ = _padded([kept for _, kept in chunks], chunks[0][0][0])
        self._slots = torch.from_numpy(np.searchsorted(rows, recomputed)).flatten().to(device)
        self._recomputed = torch.from_numpy(recomputed).flatten().to(device)
        self._kept = torch.from_numpy(kept).flatten().to(device)
        self._padding = ~is_row[..., None].to(device)

    @classmethod
    def of(cls, plan: LinkPlan, device: torch.device) -> Correction | None:
        """The correction of a plan whose rows are chosen; None if its policy does not correct.

        ValueError for a policy that drops rows from layer to layer.
        """
        policy = plan.request.policy if plan.request is not None else plan.policy
        if not isinstance(policy, CorrectingPolicy) or not policy.corrects:
            return None
        if isinstance(policy, LayerwisePolicy):
            raise ValueError(f"policy {policy.name} drops rows from layer to layer: it cannot correct others")
        rows = np.array(plan.rows, dtype=np.int64)
        computed = np.zeros(len(plan.token_ids), dtype=bool)
        computed[rows] = True
        chunks: list[tuple[Indices, Indices]] = []
        for chunk in plan.placed:
            if not chunk.is_exact:
                own = computed[chunk.start : chunk.stop]
                pair = np.flatnonzero(own) + chunk.start, np.flatnonzero(~own) + chunk.start
                chunks += [pair] if all(map(len, pair)) else []
        return cls(chunks, rows, device) if chunks else None

    def apply(
        self,
        rotations: tuple[Rotation | None, Rotation | None],
        keys: Tensor,
        values: Tensor,
        new_keys: Tensor,
        new_values: Tensor,
    ) -> None:
        """Move the kept rows of one layer in place; see :data:`Correct`. Rows differ without their RoPE."""
        kept = [side.index_select(1, self._kept) for side in (keys, values)]
        old = [side.index_select(1, self._recomputed) for side in (keys, values)]
        new = [side.index_select(1, self._slots) for side in (new_keys, new_values)]
        # Latent attention caches the rotated part as values: rows are alike by the side without RoPE.
        by = 1 if rotations[1] is None else 0
        moved = [
            _turned(strength * (now.float() - then.float()), rotation, self._recomputed, back=True)
            for strength, now, then, rotation in zip(STRENGTHS, new, old, rotations, strict=True)
        ]
        spread = self._spread(kept[by], old[by], torch.cat(moved, -1))
        sides = spread[..., : keys.shape[-1]], spread[..., keys.shape[-1] :]
        for stored, before, more, rotation in zip((keys, values), kept, sides, rotations, strict=True):
            after = _turned(more, rotation, self._kept) + before
            stored.index_copy_(1, self._kept, after.to(stored.dtype))

    def _spread(self, kept: Tensor, old: Tensor, moved: Tensor) -> Tensor:
        """``moved`` ``[kv_heads, recomputed, dims]`` as ``[kv_heads, kept, dims]``, by how alike rows are."""
        chunks, heads = self._padding.shape[0], kept.shape[0]
        one, other = (
            normalize(side.float(), dim=-1).view(heads, chunks, -1, side.shape[-1]) for side in (kept, old)
        )
        # A softmax over the recomputed rows; cosines are at most 1, so it needs no maximum.
        weights = (other.mul_(SHARPNESS) @ one.mT).exp_().masked_fill_(self._padding, 0.0)
        spread = weights.mT @ moved.view(moved.shape[0], chunks, -1, moved.shape[-1])
        return spread.div_(weights.sum(-2)[..., None]).flatten(1, 2)


def _turned(rows: Tensor, rotation: Rotation | None, at: Tensor, *, back: bool = False) -> Tensor:
    """``[heads, rows, dim]`` with the RoPE of positions ``at``, or without it."""
    if rotation is None:
        return rows
    cos, sin = rotation.cos[at], rotation.sin[at]
    if back:
        scale = cos.square() + sin.square()  # an attention factor is part of both
        cos, sin = cos / scale, -sin / scale
    return rotate(rows, cos, sin, interleaved=rotation.interleaved, offset=rotation.offset)


def _padded(rows: Sequence[Indices], padding: int | None) -> tuple[Indices, Tensor]:
    """``[chunks, longest]`` positions, the last repeated where there is no ``padding``; which are none."""
    longest = max(map(len, rows))
    fill: list[Indices] = [
        np.full(longest - len(one), one[-1] if padding is None else padding, dtype=np.int64) for one in rows
    ]
    out = np.stack([np.concatenate(both) for both in zip(rows, fill, strict=True)])
    return out, torch.arange(longest) < torch.tensor([len(one) for one in rows])[:, None]
