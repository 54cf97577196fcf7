"""Kept rows of a chunk are corrected by what its recomputed rows show (our own; docs/selection.md).

What precedes a chunk moves its tokens in similar ways. A row that is recomputed shows how far it moved from
what was stored; rows of the same chunk with similar values are moved by a part of that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from ragcachekit.plan.link_plan import LinkPlan
from ragcachekit.policies.base import CorrectingPolicy
from ragcachekit_kernels.dispatch import Rotation, rotate

SHARPNESS = 5.0
"""Factor on the cosines of rows, before the softmax over the recomputed rows of a chunk."""

STRENGTHS = 0.45, 0.3
"""Part of the deviation that kept rows are moved by: of keys, of values; fitted on SmolLM2 and SQuAD."""

Correct = Callable[[Tensor, Tensor, Tensor, Tensor], None]
"""Corrects one layer in place: keys and values ``[kv_heads, tokens, dim]``, and those of the computed rows,
``[kv_heads, rows, dim]``, which are not in place yet."""


class Correction:
    """The kept and recomputed rows of each chunk of one prompt that has both."""

    def __init__(self, chunks: Sequence[tuple[Any, Any]], rows: Any, device: torch.device) -> None:
        # Chunks are padded to one shape, so that a layer takes one batch of operations however many they are.
        recomputed, self._is_row = _padded([again for again, _ in chunks])
        kept, self._is_kept = _padded([kept for _, kept in chunks])
        self._slots = torch.from_numpy(np.searchsorted(rows, recomputed)).flatten().to(device)
        self._recomputed = torch.from_numpy(recomputed).flatten().to(device)
        self._kept = torch.from_numpy(kept).flatten().to(device)
        self._is_row, self._is_kept = self._is_row.to(device), self._is_kept.to(device)

    @classmethod
    def of(cls, plan: LinkPlan, device: torch.device) -> Correction | None:
        """The correction of a plan whose rows are chosen; None if its policy does not correct."""
        policy = plan.request.policy if plan.request is not None else plan.policy
        if not isinstance(policy, CorrectingPolicy) or not policy.corrects:
            return None
        rows = np.array(plan.rows, dtype=np.int64)
        computed = np.zeros(len(plan.token_ids), dtype=bool)
        computed[rows] = True
        chunks = []
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
        chunks, count = self._is_row.shape
        heads = keys.shape[0]
        # Latent attention caches the rotated part as values: rows are alike by the side without RoPE.
        side = values if rotations[1] is None else keys
        asked, known = (
            normalize(side[:, at].float(), dim=-1).view(side.shape[0], chunks, -1, side.shape[2])
            for at in (self._kept, self._recomputed)
        )
        scores = SHARPNESS * asked @ known.transpose(2, 3)
        weights = scores.masked_fill(~self._is_row[:, None], float("-inf")).softmax(-1)
        weights = weights * self._is_kept[..., None]
        for strength, rotation, stored, new in zip(
            STRENGTHS, rotations, (keys, values), (new_keys, new_values), strict=True
        ):
            moved = new[:, self._slots].float() - stored[:, self._recomputed].float()
            moved = _turned(moved, rotation, self._recomputed, back=True)
            spread = strength * weights @ moved.view(heads, chunks, count, -1)
            spread = _turned(spread.flatten(1, 2), rotation, self._kept)
            stored.index_add_(1, self._kept, spread.to(stored.dtype))


def _turned(rows: Tensor, rotation: Rotation | None, at: Tensor, *, back: bool = False) -> Tensor:
    """``[heads, rows, dim]`` with the RoPE of positions ``at``, or without it."""
    if rotation is None:
        return rows
    cos, sin = rotation.cos[at], rotation.sin[at]
    if back:
        scale = cos.square() + sin.square()  # an attention factor is part of both
        cos, sin = cos / scale, -sin / scale
    return rotate(rows, cos, sin, interleaved=rotation.interleaved, offset=rotation.offset)


def _padded(rows: Sequence[Any]) -> tuple[Any, Tensor]:
    """``[chunks, longest]`` positions, the last of each chunk repeated, and which of them count."""
    longest = max(map(len, rows))
    out = np.stack([np.pad(one, (0, longest - len(one)), mode="edge") for one in rows])
    lengths = torch.tensor([len(one) for one in rows])
    return out, torch.arange(longest) < lengths[:, None]
