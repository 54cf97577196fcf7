"""Kept rows of a chunk are corrected by what its recomputed rows show (our own; docs/selection.md).

What precedes a chunk moves its tokens in similar ways. A row that is recomputed shows how far it moved from
what was stored; rows of the same chunk with similar values are moved by a part of that.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import normalize

from ragcachekit.plan.link_plan import LinkPlan
from ragcachekit.policies.base import LayerwisePolicy
from ragcachekit_kernels import dispatch
from ragcachekit_kernels.dispatch import Group, Groups, Rotation

Indices = npt.NDArray[np.int64]

SHARPNESS = 5.0
"""Factor on the cosines of rows, before the softmax over the recomputed rows of a chunk."""

STRENGTHS = 0.45, 0.3
"""Part of the deviation that kept rows are moved by: of keys, of values; fitted on SmolLM2 and SQuAD."""

Correct = Callable[[Tensor, Tensor, Tensor, Tensor], None]
"""Corrects one layer in place: keys and values ``[kv_heads, tokens, dim]``, and those of the computed rows,
``[kv_heads, rows, dim]``, which are not in place yet."""


class Correction:
    """Groups of kept and recomputed rows of one prompt; ``rows`` are the positions of all computed rows."""

    def __init__(self, groups: Groups, rows: Indices, device: torch.device) -> None:
        self._groups, self._rows = groups, torch.from_numpy(rows).to(device)

    @classmethod
    def of(cls, plan: LinkPlan, device: torch.device) -> Correction | None:
        """The correction of a plan whose rows are chosen; None if its policy does not correct.

        ValueError for a policy that drops rows from layer to layer.
        """
        policy = plan.request.policy if plan.request is not None else plan.policy
        if policy is None or not getattr(policy, "corrects", False):
            return None
        if isinstance(policy, LayerwisePolicy):
            raise ValueError(f"policy {policy.name} drops rows from layer to layer: it cannot correct others")
        rows = np.array(plan.rows, dtype=np.int64)
        groups = []
        for chunk in plan.placed:
            stop = min(chunk.stop, len(plan.token_ids))  # the last token of a prompt may be left to generate
            first, last = map(int, np.searchsorted(rows, (chunk.start, stop)))
            if not chunk.is_exact and 0 < last - first < stop - chunk.start:
                groups.append(Group(chunk.start, stop, first, last))
        return cls(Groups(tuple(groups)), rows, device) if groups else None

    def apply(
        self,
        rotations: tuple[Rotation | None, Rotation | None],
        keys: Tensor,
        values: Tensor,
        new_keys: Tensor,
        new_values: Tensor,
    ) -> None:
        """Move the kept rows of one layer in place; see :data:`Correct`. Rows differ without their RoPE."""
        old = [side.index_select(1, self._rows) for side in (keys, values)]
        # Latent attention caches the rotated part as values: rows are alike by the side without RoPE.
        by = 1 if rotations[1] is None else 0
        of_keys, of_values = (
            self._straightened(strength * (now.float() - then.float()), rotation)
            for strength, now, then, rotation in zip(
                STRENGTHS, (new_keys, new_values), old, rotations, strict=True
            )
        )
        # Rows outside of chunks are in no group; recomputed ones move too, and are overwritten.
        alike = normalize(old[by].float(), dim=-1).mul_(SHARPNESS)
        dispatch.move_alike((keys, values), (of_keys, of_values), alike, by, self._groups, rotations)

    def _straightened(self, rows: Tensor, rotation: Rotation | None) -> Tensor:
        """``[heads, rows, dim]`` without the RoPE of their positions."""
        if rotation is None:
            return rows
        cos, sin = rotation.cos[self._rows], rotation.sin[self._rows]
        scale = cos.square() + sin.square()  # an attention factor is part of both
        _, _, interleaved, offset = rotation
        return dispatch.rotate(rows, cos / scale, -sin / scale, interleaved=interleaved, offset=offset)
