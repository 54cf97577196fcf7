"""Put chunk KV at its new positions and hand generate a cache that finishes the prompt in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch

from ragcachekit.forward.cache import LayerBuffers, LinkedCache, LinkedLayer
from ragcachekit.forward.copy_streams import streams_of
from ragcachekit.forward.link_rows import LinkRows
from ragcachekit.forward.placing import Placing
from ragcachekit.model.rope.rotation import Angles, Rope
from ragcachekit.plan.link_plan import LinkPlan, Piece
from ragcachekit.policies.base import Observer
from ragcachekit_kernels.dispatch import uses_triton


@dataclass(frozen=True, eq=False)
class LinkedInputs:
    """What ``model.generate`` or ``model(...)`` takes to finish linked prompts.

    ``input_ids`` and ``position_ids`` are ``[batch, slots]``: kept rows first, rows to compute last; the last
    column is each prompt's last position. ``attention_mask`` ``[batch, slots]`` is in the cache's own order
    (left-padded, sorted by position).
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


@dataclass(frozen=True, eq=False)
class Buffers:
    """Keys and values of a batch, layer by layer, and what puts them in place if a kernel does."""

    layers: tuple[LayerBuffers, ...]
    placing: Placing | None = None


def link(
    plans: Sequence[LinkPlan],
    rope: Rope,
    device: torch.device,
    pad: int,
    *,
    buffers: Buffers | None = None,
    observer: Observer | None = None,
) -> LinkedInputs:
    """Assemble one batch; at least one prompt must have a cached piece.

    Kept rows of a layer are placed and rotated when the model's forward reaches it: while layer l computes,
    later ones may still be on their way (Cache-Craft section 3.4.2). Asking for a piece that does not come
    raises ``LoadFailed``. ``buffers``, from an earlier link of one and the same prompt, saves assembling
    again: what they hold at kept rows must still be the linked KV. ``observer`` watches the forward.
    """
    widest_kept = max(plan.kept for plan in plans)
    widest_rows = max(len(plan.rows) for plan in plans)
    slots = _slots(plans)
    offsets = _offsets(plans, slots)
    rows = LinkRows(tuple(plan.rows for plan in plans), offsets, observer) if widest_rows else None
    if buffers is None:
        buffers = assemble(plans, rope, device)
    layers = [LinkedLayer(layer, slots, rows, widest_kept) for layer in buffers.layers]
    input_ids = torch.full((len(plans), slots), pad)
    position_ids = torch.zeros(len(plans), slots, dtype=torch.long)
    attention_mask = torch.zeros(len(plans), slots, dtype=torch.long)
    for item, plan in enumerate(plans):
        ids, at = _integers(plan.token_ids), _integers(plan.rows)
        kept = torch.ones(len(ids), dtype=torch.bool).index_fill_(0, at, False)
        input_ids[item, widest_kept - plan.kept : widest_kept] = ids[kept]
        if len(at):
            input_ids[item, slots - len(at) :] = ids[at]
            position_ids[item, slots - len(at) :] = at
        attention_mask[item, offsets[item] :] = 1
    cache = LinkedCache(layers, buffers.placing)
    return LinkedInputs(input_ids.to(device), position_ids.to(device), attention_mask.to(device), cache)


def _integers(values: Sequence[int]) -> torch.Tensor:
    """By way of numpy, which reads tens of thousands of Python integers several times faster."""
    return torch.from_numpy(np.fromiter(values, np.int64, len(values)))


def run_rows(model: Any, inputs: LinkedInputs, rows: int) -> None:
    """The linked forward by itself: the decoder over the last ``rows`` columns, without its LM head."""
    model.base_model(
        input_ids=inputs.input_ids[:, -rows:],
        position_ids=inputs.position_ids[:, -rows:],
        attention_mask=inputs.attention_mask,
        past_key_values=inputs.cache,
        use_cache=True,
    )


def assemble(plans: Sequence[LinkPlan], rope: Rope, device: torch.device) -> Buffers:
    """Per layer, keys and values with every kept piece in place, once they are asked for."""
    slots = _slots(plans)
    offsets = _offsets(plans, slots)
    if device.type != "cpu" or uses_triton(device):
        return _by_kernel(Placing(plans, rope, device, streams_of(device), slots=slots, offsets=offsets))
    sample = next(piece.kv for plan in plans for piece in plan.pieces)

    @cache  # one set of angles for all layers, made when the first is needed
    def turns() -> list[list[tuple[Angles, ...]]]:
        return [[_angles(rope, piece, len(p.token_ids), device) for piece in p.pieces] for p in plans]

    def make(index: int) -> tuple[torch.Tensor, torch.Tensor]:
        # Zeros where padding is attended with weight 0 (0 * NaN is NaN); else every slot is written.
        new = torch.zeros if len(plans) > 1 else torch.empty
        keys, values = (
            new(len(plans), shape[0], slots, shape[2], dtype=dtype, device=device)
            for dtype, shape in sample.shapes[index]
        )
        for item, plan in enumerate(plans):
            for piece, angle in zip(plan.pieces, turns()[item], strict=True):
                at = slice(offsets[item] + piece.start, offsets[item] + piece.stop)
                bare = _bare(piece, index, device)
                placed = rope.place(index, *bare, angle) if angle else bare
                keys[item, :, at], values[item, :, at] = placed
        return keys, values

    dtypes = [sample.shapes[index][0][0] for index in range(sample.layers)]
    return Buffers(tuple(LayerBuffers(partial(make, i), dtype, device) for i, dtype in enumerate(dtypes)))


def _by_kernel(placing: Placing) -> Buffers:
    def layer(index: int) -> LayerBuffers:
        return LayerBuffers(partial(placing.layer, index), placing.dtypes[index], placing.device)

    return Buffers(tuple(map(layer, range(len(placing.dtypes)))), placing)


def _slots(plans: Sequence[LinkPlan]) -> int:
    """Columns of the cache: as many as the most kept and the most computed rows need together."""
    return max(plan.kept for plan in plans) + max(len(plan.rows) for plan in plans)


def _offsets(plans: Sequence[LinkPlan], slots: int) -> tuple[int, ...]:
    """Per prompt, the column of its position 0."""
    return tuple(slots - len(plan.token_ids) for plan in plans)


def _bare(piece: Piece, layer: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The piece's keys and values as they are stored, on the device."""
    keys, values = piece.kv.keys[layer], piece.kv.values[layer]
    if piece.tokens < piece.kv.tokens:
        keys, values = keys[:, : piece.tokens], values[:, : piece.tokens]
    return keys.to(device, non_blocking=True), values.to(device, non_blocking=True)


def _angles(rope: Rope, piece: Piece, length: int, device: torch.device) -> tuple[Angles, ...]:
    """Angles of a piece's positions; empty for keys that are already rotated into place."""
    if piece.kv.start is not None:
        return ()
    positions = torch.arange(piece.start, piece.stop)
    return tuple(Angles(a.cos.to(device), a.sin.to(device), a.m) for a in rope.angles(positions, length))
