"""Addresses of planes and chunks and the list of blocks, packed into one buffer that goes up in one copy."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ragcachekit_kernels.planes import Format, Layout, Numbers, Place, Plane, aligned
from ragcachekit_kernels.rows import Rows

NOWHERE = np.zeros((1, 6), dtype=np.int64)

Skipped = npt.NDArray[np.bool_]


class Shape(NamedTuple):
    """What all of a launch has in common: a kernel is compiled for it.

    Attributes
    ----------
    kv : torch.dtype
        Of the request's KV.
    chunk : Format
        Of the chunks' tensors.
    pairs, offset, interleaved
        What is rotated in planes that have a table; no pairs if none has.
    aligned : bool
        Whether all rows, on both sides, begin at multiples of 16 bytes.
    """

    kv: torch.dtype
    chunk: Format
    pairs: int
    offset: int
    interleaved: bool
    aligned: bool


@dataclass(frozen=True, eq=False)
class Batch:
    """One launch.

    Attributes
    ----------
    shape : Shape
    planes : tuple of int
        Which planes, ascending.
    addresses : Numbers
        ``[planes, 4]``: of a plane, its address, its head stride, and the addresses of cos and sin (0: none).
    entries : Numbers
        ``[pieces, planes, 2]``, or 6 with scales: :attr:`ChunkTensors.entries`; an address 0 says that the
        piece lies in the plane already.
    places : tuple of Place
        Of the pieces.
    """

    shape: Shape
    planes: tuple[int, ...]
    addresses: Numbers
    entries: Numbers
    places: tuple[Place, ...]


def batches(layout: Layout) -> list[Batch]:
    """What can go in one launch each: for an ordinary model all of it."""
    out = []
    for pieces in _alike(layout.signatures):
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
    """``[blocks, 4]``: piece, first token in it, slot of that token, 2 x tokens + (1 if to be rotated).

    Blocks have ``tokens`` tokens, or what is left of their piece (None: they are whole pieces). Those that
    are skipped altogether are left out.
    """
    starts, sizes, fixed = np.array([(p.start, p.tokens, p.rotated) for p in places], dtype=np.int64).T
    tokens = int(sizes.max()) if tokens is None else tokens
    per_piece = -(-sizes // tokens)
    piece = np.repeat(np.arange(len(places)), per_piece)
    first = (np.arange(len(piece)) - np.repeat(np.cumsum(per_piece) - per_piece, per_piece)) * tokens
    slot = starts[piece] + first
    count = np.minimum(sizes[piece] - first, tokens)
    out: Numbers = np.stack((piece, first, slot, 2 * count + (1 - fixed[piece])), 1)
    if skipped is None:
        return out
    before = np.concatenate(([0], np.cumsum(skipped, dtype=np.int64)))
    return np.compress(before[slot + count] - before[slot] < count, out, axis=0)


def skipped(layout: Layout) -> Skipped | None:
    """``[slots that are used]``, padded to a multiple of 8: whether a position is skipped; None: none is."""
    positions = np.array(
        layout.skip.positions if isinstance(layout.skip, Rows) else layout.skip, dtype=np.int64
    )
    positions = positions[(positions >= 0) & (positions < layout.stop)]
    if not len(positions):
        return None
    out = np.zeros(-(-layout.stop // 8) * 8, dtype=np.bool_)
    out[positions] = True
    return out


def upload(parts: Sequence[Numbers], device: torch.device) -> tuple[torch.Tensor, tuple[int, ...]]:
    """All parts in one int64 tensor on ``device``, and where each of them begins.

    One copy from pinned memory: the host does not wait for it.
    """
    ends = np.cumsum([part.size for part in parts]).tolist()
    host = torch.empty(ends[-1], dtype=torch.int64, pin_memory=device.type == "cuda")
    numbers = host.numpy()
    for part, end in zip(parts, ends, strict=True):
        numbers[end - part.size : end] = part.reshape(-1)
    starts = tuple(end - part.size for part, end in zip(parts, ends, strict=True))
    return host.to(device, non_blocking=True), starts


def _alike(kinds: Iterable[Hashable]) -> list[list[int]]:
    """Indices of equal ones together."""
    groups: dict[Hashable, list[int]] = {}
    for index, kind in enumerate(kinds):
        groups.setdefault(kind, []).append(index)
    return list(groups.values())


def _by_rotation(layout: Layout, planes: Sequence[int], chunk: Format) -> list[tuple[Shape, list[int]]]:
    """Planes that rotate in the same way; those that do not rotate go with the first of these."""
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
