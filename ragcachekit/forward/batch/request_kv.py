"""Keys and values of one decoded request, in buffers with room for the tokens to come."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer

GROWTH = 256
"""Rows that a full buffer grows by: a copy every so many tokens, not memory for all that may come."""


class RequestKV:
    """Per layer, keys and values ``[kv_heads, capacity, head_dim]``, of which the first ``rows`` are written.

    The rows come out of ``cache`` (``[1, kv_heads, tokens, head_dim]`` per layer), whose layers are emptied
    one by one, so that no more than one layer is held twice.
    """

    def __init__(self, cache: Any, rows: int, new: int) -> None:
        self.rows = rows
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        room = rows + min(new, GROWTH)
        for layer in cache.layers:
            self.keys.append(_moved(layer.keys[0], rows, room))
            self.values.append(_moved(layer.values[0], rows, room))
            layer.keys = layer.values = None

    def make_room(self) -> None:
        """Grow full buffers by :data:`GROWTH` rows."""
        if self.rows == self.keys[0].shape[1]:
            for sides in (self.keys, self.values):
                for index, old in enumerate(sides):
                    sides[index] = _moved(old, self.rows, self.rows + GROWTH)

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write the row after the last one, ``[kv_heads, 1, head_dim]``; ``rows`` counts it later."""
        self.keys[layer].narrow(1, self.rows, 1).copy_(keys)
        self.values[layer].narrow(1, self.rows, 1).copy_(values)

    def as_cache(self) -> Cache:
        """Views of the written rows, ``[1, kv_heads, rows, head_dim]`` per layer."""
        layers = []
        for keys, values in zip(self.keys, self.values, strict=True):
            layer = DynamicLayer()
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys[None, :, : self.rows], values[None, :, : self.rows]
            layers.append(layer)
        return Cache(layers=layers)


def _moved(side: torch.Tensor, rows: int, room: int) -> torch.Tensor:
    out = side.new_empty(side.shape[0], room, side.shape[2])
    out[:, :rows] = side[:, :rows]
    return out
