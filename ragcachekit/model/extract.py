"""Extraction of keys and values from the cache of a forward, copied and without RoPE."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ragcachekit.model.rope.rotation import Rope
from ragcachekit.model.tensor_block import carved, offsets
from ragcachekit_kernels import dispatch

log = logging.getLogger(__name__)


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
    locked: bool = True,
) -> list[Sides]:
    """Copy stretches of a cache, each into memory of its own.

    With kernels, one launch and one copy serve all layers of a stretch; the host waits once, for the last
    copy.

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
    locked : bool
        Page-lock host blocks if possible, so that copies overlap. Not for large KV that is kept long.
    """
    if not stretches:
        return []
    device = layers[0].keys.device
    if not dispatch.uses_triton(device):
        return _by_torch(layers, stretches, rope, length, host)
    tables = () if rope is None else rope.unturns.on(device, length)
    planes = {item: _planes(layers, item, rope) for item in {stretch.item for stretch in stretches}}
    out = []
    for item, start, stop in stretches:
        kvs = [plane.kv for plane in planes[item]]
        sides = [(kv.dtype, (kv.shape[0], stop - start, kv.shape[2])) for kv in kvs]
        block = torch.empty(offsets(sides)[-1], dtype=torch.uint8, device=device)
        chunk = dispatch.ChunkTensors(carved(block, sides))
        dispatch.disassemble(planes[item], [dispatch.Place(start, stop - start)], [chunk], tables)
        if host and device.type != "cpu":
            block = _to_host(block, locked)
        tensors = carved(block, sides)
        out.append(Sides(tuple(tensors[::2]), tuple(tensors[1::2])))
    if host and device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return out


def _by_torch(
    layers: Sequence[Any], stretches: Sequence[Stretch], rope: Rope | None, length: int, host: bool
) -> list[Sides]:
    to = "cpu" if host else layers[0].keys.device
    out = []
    for item, start, stop in stretches:
        angles = None if rope is None else rope.angles(torch.arange(start, stop), length)
        keys, values = [], []
        for index, layer in enumerate(layers):
            kv = layer.keys[item, :, start:stop], layer.values[item, :, start:stop]
            if rope is not None and angles is not None:
                kv = rope.strip(index, *kv, angles)
            # Copies: views would keep the whole cache alive.
            keys.append(kv[0].to(to, copy=True))
            values.append(kv[1].to(to, copy=True))
        out.append(Sides(tuple(keys), tuple(values)))
    return out


def _planes(layers: Sequence[Any], item: int, rope: Rope | None) -> list[dispatch.Plane]:
    out: list[dispatch.Plane] = []
    for index, layer in enumerate(layers):
        keys, values = _with_rows(layer.keys[item]), _with_rows(layer.values[item])
        if rope is None:
            out += dispatch.Plane(keys), dispatch.Plane(values)
        else:
            out += rope.planes(index, keys, values)
    return out


def _with_rows(side: torch.Tensor) -> torch.Tensor:
    """Adjacent rows, as kernels read them; most caches have them already."""
    _, step, one = side.stride()
    return side if (step, one) == (side.shape[2], 1) else side.contiguous()


def _to_host(block: torch.Tensor, locked: bool) -> torch.Tensor:
    try:
        into = torch.empty(block.numel(), dtype=torch.uint8, pin_memory=locked)
    except RuntimeError as error:  # the system limits how much may be page-locked
        log.info("cannot page-lock memory for encoded KV, going on without: %s", error)
        into = torch.empty(block.numel(), dtype=torch.uint8)
    return into.copy_(block, non_blocking=True)
