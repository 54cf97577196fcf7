"""Extraction of keys and values from the cache of a forward, copied and without RoPE."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ragcachekit.model.rope.rotation import Rope


class Stretch(NamedTuple):
    """Rows of one prompt of a batch: columns ``start .. stop - 1`` of its cache."""

    item: int
    start: int
    stop: int


class Sides(NamedTuple):
    """Keys and values of one stretch, ``[kv_heads, tokens, head_dim]`` per layer."""

    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]


def extract(
    layers: Sequence[Any],
    stretches: Sequence[Stretch],
    rope: Rope | None = None,
    length: int = 0,
    *,
    host: bool = True,
) -> list[Sides]:
    """Copy stretches of a cache, each into memory of its own.

    Parameters
    ----------
    layers : sequence
        Of a cache: ``keys`` and ``values`` ``[batch, kv_heads, columns, head_dim]``.
    stretches : sequence of Stretch
        At least one token each; may overlap.
    rope : Rope, optional
        Removed from the rotated side; columns must then be positions. None: copied unchanged.
    length : int
        With ``rope``: tokens of the prompt whose frequencies were used; at least every ``stop``.
    host : bool
        Copy to the host; otherwise results stay on the device, complete in the order of its stream.
    """
    out = []
    for item, start, stop in stretches:
        angles = None if rope is None else rope.angles(torch.arange(start, stop), length)
        keys, values = [], []
        for index, layer in enumerate(layers):
            kv = layer.keys[item, :, start:stop], layer.values[item, :, start:stop]
            if rope is not None and angles is not None:
                kv = rope.strip(index, *kv, angles)
            to = "cpu" if host else layer.keys.device
            # Copies: views would keep the whole cache alive.
            keys.append(kv[0].to(to, copy=True))
            values.append(kv[1].to(to, copy=True))
        out.append(Sides(tuple(keys), tuple(values)))
    return out
