"""Put chunk KV at its new positions and hand generate a cache that finishes the prompt in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ragcachekit.link.cache import LinkedCache, LinkedLayer, LinkRows, Observer
from ragcachekit.link.plan import LinkPlan, Piece
from ragcachekit.model.rope import Angles, Rope


@dataclass(frozen=True, eq=False)
class LinkedInputs:
    """What ``model.generate`` or ``model(...)`` takes to finish linked prompts.

    Attributes
    ----------
    input_ids : torch.Tensor
        ``[batch, slots]``: ids of kept rows first, ids of the rows to compute last.
    position_ids : torch.Tensor
        ``[batch, slots]`` to match; the last column is each prompt's last position.
    attention_mask : torch.Tensor
        ``[batch, slots]`` in the cache's own order (left-padded, sorted by position).
    cache : LinkedCache
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    attention_mask: torch.Tensor
    cache: LinkedCache

    def as_kwargs(self) -> dict[str, Any]:
        """Keyword arguments of ``generate``."""
        return {
            "input_ids": self.input_ids,
            "position_ids": self.position_ids,
            "attention_mask": self.attention_mask,
            "past_key_values": self.cache,
        }


Buffers = list[tuple[torch.Tensor, torch.Tensor]]
"""Per layer ``[batch, kv_heads, slots, head_dim]`` keys and values of a request."""


def link(
    plans: Sequence[LinkPlan],
    rope: Rope,
    device: torch.device,
    pad: int,
    *,
    buffers: Buffers | None = None,
    observer: Observer | None = None,
) -> LinkedInputs:
    """Assemble one batch.

    Kept rows are placed and rotated now; the rows to compute arrive with the model's forward. At
    least one prompt must have a cached piece (otherwise an ordinary prefill is what is wanted).
    ``buffers``, from an earlier link of one and the same prompt, saves assembling again: what they
    hold at kept rows must still be the linked KV. ``observer`` watches the forward.
    """
    widest_kept = max(plan.kept for plan in plans)
    widest_rows = max(len(plan.rows) for plan in plans)
    slots = widest_kept + widest_rows
    offsets = tuple(slots - len(plan.token_ids) for plan in plans)
    rows = LinkRows(tuple(plan.rows for plan in plans), offsets, observer) if widest_rows else None
    if buffers is None:
        buffers = _assemble(plans, offsets, slots, rope, device)
    layers = [
        LinkedLayer(keys[:, :, :slots], values[:, :, :slots], rows, widest_kept) for keys, values in buffers
    ]
    input_ids = torch.full((len(plans), slots), pad)
    position_ids = torch.zeros(len(plans), slots, dtype=torch.long)
    attention_mask = torch.zeros(len(plans), slots, dtype=torch.long)
    for item, plan in enumerate(plans):
        computed = set(plan.rows)
        kept_ids = [t for p, t in enumerate(plan.token_ids) if p not in computed]
        row_ids = [plan.token_ids[p] for p in plan.rows]
        input_ids[item, widest_kept - len(kept_ids) : widest_kept] = torch.tensor(kept_ids, dtype=torch.long)
        if row_ids:
            input_ids[item, slots - len(row_ids) :] = torch.tensor(row_ids)
            position_ids[item, slots - len(row_ids) :] = torch.tensor(plan.rows)
        attention_mask[item, offsets[item] :] = 1
    return LinkedInputs(
        input_ids.to(device), position_ids.to(device), attention_mask.to(device), LinkedCache(layers)
    )


def run_rows(model: Any, inputs: LinkedInputs, rows: int) -> None:
    """The linked forward by itself: the decoder over the last ``rows`` columns, without its LM head."""
    model.base_model(
        input_ids=inputs.input_ids[:, -rows:],
        position_ids=inputs.position_ids[:, -rows:],
        attention_mask=inputs.attention_mask,
        past_key_values=inputs.cache,
        use_cache=True,
    )


def _assemble(
    plans: Sequence[LinkPlan], offsets: Sequence[int], slots: int, rope: Rope, device: torch.device
) -> Buffers:
    """Per layer ``[batch, kv_heads, slots, head_dim]`` keys and values with every kept piece in place."""
    sample = next(piece.kv for plan in plans for piece in plan.pieces)
    angles = [[_angles(rope, piece, len(plan.token_ids), device) for piece in plan.pieces] for plan in plans]
    layers = []
    for index in range(sample.layers):
        # Zeros where padding is attended with weight 0 (0 * NaN is NaN); else every slot is written.
        new = torch.zeros if len(plans) > 1 else torch.empty
        keys, values = (
            new(len(plans), t.shape[0], slots, t.shape[2], dtype=t.dtype, device=device)
            for t in (sample.keys[index], sample.values[index])
        )
        for item, plan in enumerate(plans):
            for piece, angle in zip(plan.pieces, angles[item], strict=True):
                at = slice(offsets[item] + piece.start, offsets[item] + piece.start + piece.kv.tokens)
                bare = piece.kv.keys[index].to(device, non_blocking=True), piece.kv.values[index].to(device)
                placed = rope.place(index, *bare, angle) if angle else bare
                keys[item, :, at], values[item, :, at] = placed
        layers.append((keys, values))
    return layers


def _angles(rope: Rope, piece: Piece, length: int, device: torch.device) -> tuple[Angles, ...]:
    """Angles of a piece's positions; empty for keys that are already rotated into place."""
    if piece.kv.start is not None:
        return ()
    positions = torch.arange(piece.start, piece.start + piece.kv.tokens)
    return tuple(Angles(a.cos.to(device), a.sin.to(device), a.m) for a in rope.angles(positions, length))
