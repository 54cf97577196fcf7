"""Linking: chunk KV goes to its new positions in a cache that one forward completes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch

from ragcachekit.forward.cache import LinkedCache, LinkedLayer, LinkRows, MakeLayer
from ragcachekit.forward.copy_streams import streams_of
from ragcachekit.forward.placing import Placing
from ragcachekit.model.rope.rotation import Angles, Rope
from ragcachekit.plan.link_plan import LinkPlan, Piece
from ragcachekit.policies.base import Observer
from ragcachekit.store.loading.load import Pair
from ragcachekit_kernels.dispatch import uses_triton


@dataclass(frozen=True, eq=False)
class LinkedInputs:
    """Arguments with which ``model.generate`` or ``model(...)`` completes linked prompts.

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
    """Keys and values of a batch, layer by layer; with ``placing`` where kernels put them in place.

    Each of ``layers`` does its work at the first call. ``dtypes`` are those of the layers' keys.
    """

    layers: tuple[MakeLayer, ...]
    dtypes: tuple[torch.dtype, ...]
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
    later ones may still be loading (Cache-Craft section 3.4.2). A piece that cannot be loaded raises
    ``LoadFailed`` then. ``buffers`` are those of an earlier link of the same prompt; their kept rows must
    still be the linked KV. ``observer`` is called by every layer.
    """
    widest_kept = max(plan.kept for plan in plans)
    widest_rows = max(len(plan.rows) for plan in plans)
    slots = _slots(plans)
    offsets = _offsets(plans, slots)
    rows = LinkRows(tuple(plan.rows for plan in plans), offsets, observer) if widest_rows else None
    if buffers is None:
        buffers = assemble(plans, rope, device)
    layers = [
        LinkedLayer(make, dtype, device, slots, rows, widest_kept)
        for make, dtype in zip(buffers.layers, buffers.dtypes, strict=True)
    ]
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
    linked = LinkedCache(layers, buffers.placing)
    return LinkedInputs(input_ids.to(device), position_ids.to(device), attention_mask.to(device), linked)


def _integers(values: Sequence[int]) -> torch.Tensor:
    """By numpy, which converts tens of thousands of Python integers several times faster."""
    return torch.from_numpy(np.fromiter(values, np.int64, len(values)))


def run_rows(model: Any, inputs: LinkedInputs, rows: int) -> None:
    """Run the linked forward: the decoder over the last ``rows`` columns, without the LM head."""
    model.base_model(
        input_ids=inputs.input_ids[:, -rows:],
        position_ids=inputs.position_ids[:, -rows:],
        attention_mask=inputs.attention_mask,
        past_key_values=inputs.cache,
        use_cache=True,
    )


def assemble(plans: Sequence[LinkPlan], rope: Rope, device: torch.device) -> Buffers:
    """Per layer, keys and values with every kept piece in place, made when they are read."""
    slots = _slots(plans)
    offsets = _offsets(plans, slots)
    if device.type != "cpu" or uses_triton(device):
        placing = Placing(plans, rope, device, streams_of(device), slots=slots, offsets=offsets)
        layers = (cache(partial(placing.layer, number)) for number in range(len(placing.dtypes)))
        return Buffers(tuple(layers), tuple(placing.dtypes), placing)
    sample = next(piece.kv for plan in plans for piece in plan.pieces)

    turns = [[_angles(rope, piece, len(plan.token_ids)) for piece in plan.pieces] for plan in plans]

    def make(index: int) -> Pair:
        # Padding is attended with weight 0, and 0 * NaN is NaN. Without padding every slot is written.
        new = torch.zeros if len(plans) > 1 else torch.empty
        keys, values = (
            new(len(plans), heads, slots, dim, dtype=dtype) for dtype, (heads, _, dim) in sample.shapes[index]
        )
        for item, plan in enumerate(plans):
            for piece, angles in zip(plan.pieces, turns[item], strict=True):
                at = slice(offsets[item] + piece.start, offsets[item] + piece.stop)
                own = piece.kv.keys[index][:, : piece.tokens], piece.kv.values[index][:, : piece.tokens]
                keys[item, :, at], values[item, :, at] = rope.place(index, *own, angles) if angles else own
        return keys, values

    layers = (cache(partial(make, index)) for index in range(sample.layers))
    return Buffers(tuple(layers), tuple(keys[0] for keys, _ in sample.shapes))


def _slots(plans: Sequence[LinkPlan]) -> int:
    """Columns of the cache: the most kept and the most computed rows of any prompt together."""
    return max(plan.kept for plan in plans) + max(len(plan.rows) for plan in plans)


def _offsets(plans: Sequence[LinkPlan], slots: int) -> tuple[int, ...]:
    """Per prompt, the column of its position 0."""
    return tuple(slots - len(plan.token_ids) for plan in plans)


def _angles(rope: Rope, piece: Piece, length: int) -> tuple[Angles, ...]:
    """Angles of a piece's positions; empty for keys that are stored with RoPE."""
    if piece.kv.start is not None:
        return ()
    return tuple(rope.angles(torch.arange(piece.start, piece.stop), length))
