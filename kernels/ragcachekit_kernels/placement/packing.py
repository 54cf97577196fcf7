"""Addresses of planes and chunks and the list of blocks, packed into one buffer for one copy."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ragcachekit_kernels.placement.planes import Format, Layout, Numbers, Place, Plane, aligned
from ragcachekit_kernels.rows import Rows

NOWHERE = np.zeros((1, 6), dtype=np.int64)

Skipped = npt.NDArray[np.bool_]


class Shape(NamedTuple):
    """Properties of a launch that its kernel is compiled for.

    ``kv`` and ``chunk`` are the types of the request's KV and of the chunks' tensors; ``pairs`` is 0 if no
    plane is rotated; ``aligned`` if all rows, on both sides, start at multiples of 16 bytes.
    """

    kv: torch.dtype
    chunk: Format
    pairs: int
    offset: int
    interleaved: bool
    aligned: bool


@dataclass(frozen=True, eq=False)
class Batch:
    """Data of one launch.

    Attributes
    ----------
    planes : tuple of int
        Indices of the planes, ascending.
    addresses : Numbers
        ``[planes, 4]``: address and head stride of a plane, addresses of cos and sin (0: none).
    entries : Numbers
        ``[pieces, planes, 2]``, or 6 with scales: :attr:`ChunkTensors.entries`. Address 0: the piece is in
        the plane already.
    places : tuple of Place
        Place of each piece.
    """

    shape: Shape
    planes: tuple[int, ...]
    addresses: Numbers
    entries: Numbers
    places: tuple[Place, ...]


def batches(layout: Layout) -> list[Batch]:
    """Division of a layout into launches, one for an ordinary model."""
    out = []
    for pieces in _alike(None if chunk is None else chunk.signature for chunk in layout.chunks):
        formats = layout.formats(pieces[0])
        places = tuple(layout.places[i] for i in pieces)
        entries = np.stack([_entries(layout, i) for i in pieces])
        for planes in _alike(
            (p.kv.dtype, aligned(p.kv), f) for p, f in zip(layout.planes, formats, strict=True)
        ):
            for shape, group in _by_rotation(layout, planes, formats[planes[0]]):
                columns = 6 if shape.chunk.scaled else 2
                own = entries if len(group) == len(layout.planes) else entries[:, list(group)]
                addresses = np.array([_address(layout, layout.planes[i]) for i in group], dtype=np.int64)
                out.append(Batch(shape, tuple(group), addresses, own[..., :columns], places))
    return out


def blocks(places: Sequence[Place], tokens: int | None = None, skipped: Skipped | None = None) -> Numbers:
    """Blocks ``[blocks, 4]``: piece, first token in it, slot of that token, 2 x tokens + (1 if rotated).

    Blocks have ``tokens`` tokens or the rest of their piece (None: whole pieces). Blocks whose slots are all
    skipped are left out.
    """
    starts, sizes, fixed = np.array([(p.start, p.tokens, p.rotated) for p in places], dtype=np.int64).T
    tokens = int(sizes.max()) if tokens is None else tokens
    per_piece = -(-sizes // tokens)
    piece = np.repeat(np.arange(len(places)), per_piece)
    first = (np.arange(len(piece)) - np.repeat(np.cumsum(per_piece) - per_piece, per_piece)) * tokens
    slot = starts[piece] + first
    count = np.minimum(sizes[piece] - first, tokens)
    skip = np.array([p.first for p in places], dtype=np.int64)
    out: Numbers = np.stack((piece, first + skip[piece], slot, 2 * count + (1 - fixed[piece])), 1)
    if skipped is None:
        return out
    before = np.concatenate(([0], np.cumsum(skipped, dtype=np.int64)))
    return np.compress(before[slot + count] - before[slot] < count, out, axis=0)


def skipped(layout: Layout) -> Skipped | None:
    """Skipped positions as flags per slot, padded to a multiple of 8; None without any."""
    skip = layout.skip.positions if isinstance(layout.skip, Rows) else layout.skip
    positions = np.array(skip, dtype=np.int64)
    positions = positions[(positions >= 0) & (positions < layout.stop)]
    if not len(positions):
        return None
    out = np.zeros(-(-layout.stop // 8) * 8, dtype=np.bool_)
    out[positions] = True
    return out


def upload(parts: Sequence[Numbers], device: torch.device) -> tuple[torch.Tensor, tuple[int, ...]]:
    """One int64 tensor of all parts on ``device``, copied from pinned memory, and the parts' offsets."""
    ends = np.cumsum([part.size for part in parts]).tolist()
    host = torch.empty(ends[-1], dtype=torch.int64, pin_memory=device.type == "cuda")
    numbers = host.numpy()
    for part, end in zip(parts, ends, strict=True):
        numbers[end - part.size : end] = part.reshape(-1)
    starts = tuple(end - part.size for part, end in zip(parts, ends, strict=True))
    return host.to(device, non_blocking=True), starts


def _alike(kinds: Iterable[Hashable]) -> list[list[int]]:
    """Indices of equal kinds, grouped."""
    groups: dict[Hashable, list[int]] = {}
    for index, kind in enumerate(kinds):
        groups.setdefault(kind, []).append(index)
    return list(groups.values())


def _by_rotation(layout: Layout, planes: Sequence[int], chunk: Format) -> list[tuple[Shape, list[int]]]:
    """Groups of planes with the same rotation; planes without one join the first group."""
    kinds: dict[tuple[int, int, bool], list[int]] = {}
    still = []
    for index in planes:
        plane = layout.planes[index]
        if plane.table is None:
            still.append(index)
        else:
            pairs = layout.tables[plane.table][0].shape[1]
            kinds.setdefault((pairs, plane.offset, plane.interleaved), []).append(index)
    first = next(iter(kinds), (0, 0, False))
    kinds[first] = sorted(kinds.get(first, []) + still)
    kv = layout.planes[planes[0]].kv
    turns = [table for plane in planes if (table := layout.planes[plane].table) is not None]
    whole = (
        chunk.aligned and aligned(kv) and all(t.data_ptr() % 16 == 0 for i in turns for t in layout.tables[i])
    )
    return [(Shape(kv.dtype, chunk, *kind, whole), group) for kind, group in kinds.items()]


def _entries(layout: Layout, piece: int) -> Numbers:
    chunk = layout.chunks[piece]
    return NOWHERE.repeat(len(layout.planes), 0) if chunk is None else chunk.entries


def _address(layout: Layout, plane: Plane) -> tuple[int, int, int, int]:
    here = plane.kv.data_ptr(), plane.kv.stride(0)
    if plane.table is None:
        return *here, 0, 0
    cos, sin = layout.tables[plane.table]
    return *here, cos.data_ptr(), sin.data_ptr()
