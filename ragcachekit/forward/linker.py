"""Linking: chunk KV goes to its new positions in a cache that one forward completes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch

from ragcachekit.forward.cache import LinkedCache, LinkedLayer, LinkRows, MakeLayer
from ragcachekit.forward.stored_layers import StoredLayers
from ragcachekit.model.rope.rotation import Rope
from ragcachekit.plan.link_plan import LinkPlan
from ragcachekit.policies.base import AttentionObserver
from ragcachekit.store.base import Pair
from ragcachekit_kernels.dispatch import Place, Places
from ragcachekit_kernels.dispatch import assemble as place_pieces


@dataclass(frozen=True, eq=False)
class LinkedInputs:
    """Arguments with which ``model.generate`` or ``model(...)`` completes a linked prompt.

    ``input_ids`` and ``position_ids`` are ``[1, tokens]``: kept rows first, rows to compute last; the last
    column is the prompt's last position. ``attention_mask`` is ones.
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
    """Keys and values of a prompt, layer by layer.

    Each of ``layers`` does its work at the first call. ``dtypes`` are those of the layers' keys.
    """

    layers: tuple[MakeLayer, ...]
    dtypes: tuple[torch.dtype, ...]


def link(
    plan: LinkPlan,
    rope: Rope,
    device: torch.device,
    *,
    buffers: Buffers | None = None,
    observer: AttentionObserver | None = None,
) -> LinkedInputs:
    """Assemble the cache of a prompt with at least one cached piece.

    Kept rows of a layer are placed and rotated when the model's forward reaches it: while layer l computes,
    later ones may still be loading (Cache-Craft section 3.4.2). A piece that cannot be loaded raises
    ``LoadFailed`` then. ``buffers`` are those of an earlier link of the same prompt; their kept rows must
    still be the linked KV. ``observer`` is called by every layer.
    """
    rows = LinkRows.of(plan.rows, observer) if plan.rows else None
    if buffers is None:
        buffers = assemble(plan, rope, device)
    tokens = len(plan.token_ids)
    layers = [
        LinkedLayer(make, dtype, device, tokens, rows, plan.kept)
        for make, dtype in zip(buffers.layers, buffers.dtypes, strict=True)
    ]
    ids, at = _integers(plan.token_ids), _integers(plan.rows)
    kept = torch.ones(tokens, dtype=torch.bool).index_fill_(0, at, False)
    input_ids = torch.cat([ids[kept], ids[at]])[None]
    position_ids = torch.cat([at.new_zeros(plan.kept), at])[None]
    linked = LinkedCache(layers)
    attention_mask = torch.ones_like(input_ids)
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


def assemble(plan: LinkPlan, rope: Rope, device: torch.device) -> Buffers:
    """Per layer, keys and values with every kept piece in its place, made when they are read.

    Stored tensors are read only. Keys are rotated to their positions in float32 and rounded once; eight-bit
    entries are multiplied by their scales on the way.
    """
    tokens, pieces = len(plan.token_ids), plan.pieces
    places = Places(tuple(Place(p.start, p.tokens, p.kv.start is not None) for p in pieces))
    stored = StoredLayers({id(p.kv): p.kv for p in pieces}, device)
    shapes, turns = pieces[0].kv.shapes, rope.turns.on(device, tokens)

    def make(index: int) -> Pair:
        layer = stored.take(index)
        keys, values = (
            torch.empty(1, heads, tokens, dim, dtype=dtype, device=device)
            for dtype, (heads, _, dim) in shapes[index]
        )
        for number, out in enumerate((keys, values)):
            parts = [layer[id(p.kv)] for p in pieces]
            own = [part[number][:, p.rows] for part, p in zip(parts, pieces, strict=True)]
            scales = [_scale(part, number, p.rows) for part, p in zip(parts, pieces, strict=True)]
            place_pieces(out[0], own, places, rope.rotations(index, turns)[number], scales)
        return keys, values

    makers = (cache(partial(make, index)) for index in range(len(shapes)))
    return Buffers(tuple(makers), tuple(keys[0] for keys, _ in shapes))


def _scale(stored: Sequence[torch.Tensor], side: int, rows: slice) -> torch.Tensor | None:
    """Scales of an eight-bit piece: of keys one per channel, of values one per token."""
    if len(stored) == 2:
        return None
    return stored[2 + side][:, rows] if side else stored[2]
