"""Layout of chunks' tensors in a request's KV."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

Table = tuple[torch.Tensor, torch.Tensor]
"""cos and sin, contiguous float32 ``[positions, pairs]``, one row per position."""

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Plane:
    """Keys or values of one layer of one request.

    Attributes
    ----------
    kv : torch.Tensor
        ``[heads, slots, dim]``, one slot per position; rows contiguous, head stride free.
    table : int or None
        Index of the rotation table; None: not rotated.
    interleaved, offset
        As for :func:`ragcachekit_kernels.reference.rotate`.
    """

    kv: torch.Tensor
    table: int | None = None
    interleaved: bool = False
    offset: int = 0


@dataclass(frozen=True)
class Place:
    """Positions ``start .. start + tokens - 1`` of the ``tokens`` tokens of a chunk from ``first`` on.

    ``rotated``: the keys are rotated for these positions already (an exact prefix), and are copied. ``first``
    is for assembly alone.
    """

    start: int
    tokens: int
    rotated: bool = False
    first: int = 0


class Format(NamedTuple):
    """Properties of one tensor of a chunk that a kernel is compiled for."""

    heads: int
    dim: int
    dtype: torch.dtype
    scaled: bool
    aligned: bool


@dataclass(frozen=True, eq=False)
class ChunkTensors:
    """Tensors of one chunk, one per plane and in the order of the planes.

    Shapes and addresses are read once: for the 4,096 tensors of 64 chunks and 32 layers, that takes longer
    than the kernel.

    Attributes
    ----------
    tensors : sequence of torch.Tensor
        ``[heads, tokens, dim]``, rows contiguous, head stride free; all on one device, maybe longer than
        the chunk.
    scales : sequence of (torch.Tensor or None)
        Empty, or per tensor the factor of its elements, contiguous float32: one per channel ``[heads, 1,
        dim]`` or per token ``[heads, tokens, 1]``; None for tensors that are not quantised.
    """

    tensors: Sequence[torch.Tensor]
    scales: Sequence[torch.Tensor | None] = ()

    @classmethod
    def joined(cls, parts: Sequence[ChunkTensors]) -> ChunkTensors:
        """Planes of all parts in order, with the shapes and addresses that the parts have read already."""
        tensors = tuple(tensor for part in parts for tensor in part.tensors)
        scales: tuple[torch.Tensor | None, ...] = ()
        if any(part.scales for part in parts):
            scales = tuple(part.scale(i) for part in parts for i in range(len(part.tensors)))
        kinds: dict[Format, int] = {}
        # By identity: layers that share their memory are the same part.
        known: dict[int, list[int]] = {}
        numbers: list[int] = []
        for part in parts:
            own = known.get(id(part.signature))
            if own is None:
                new = [kinds.setdefault(kind, len(kinds)) for kind in part.signature[0]]
                own = known[id(part.signature)] = [new[number] for number in part.signature[1]]
            numbers += own
        whole = cls(tensors, scales)
        entries = np.concatenate([part.entries for part in parts])
        whole.__dict__.update(signature=(tuple(kinds), tuple(numbers)), entries=entries)
        return whole

    def scale(self, plane: int) -> torch.Tensor | None:
        """Scales of one tensor."""
        return self.scales[plane] if self.scales else None

    @cached_property
    def formats(self) -> tuple[Format, ...]:
        """Formats per plane."""
        kinds, numbers = self.signature
        return tuple(kinds[number] for number in numbers)

    @cached_property
    def signature(self) -> tuple[tuple[Format, ...], tuple[int, ...]]:
        """Distinct formats and each plane's index among them; equal for chunks of equal formats."""
        checked: dict[Hashable, Format] = {}  # chunks have few formats and many tensors
        kinds: dict[Format, int] = {}
        numbers = []
        for index, tensor in enumerate(self.tensors):
            scale = self.scale(index)
            whole = tensor.data_ptr() % 16 == 0 and (scale is None or scale.data_ptr() % 16 == 0)
            scales = None if scale is None else scale.shape
            like = (tensor.dtype, tensor.shape, tensor.stride(), whole, scales)
            if like not in checked:
                checked[like] = _format(tensor, scale)
            numbers.append(kinds.setdefault(checked[like], len(kinds)))
        return tuple(kinds), tuple(numbers)

    @cached_property
    def entries(self) -> Numbers:
        """``[planes, 6]``: address and head stride of the elements and of the scales, and the scales'
        strides per token and per channel."""
        return np.array([_entry(t, self.scale(i)) for i, t in enumerate(self.tensors)], dtype=np.int64)


@dataclass(frozen=True, eq=False)
class Layout:
    """Assignment of chunks to places; fields as for :func:`ragcachekit_kernels.dispatch.assembly`.

    Raises
    ------
    ValueError
        If shapes do not fit together, or places overlap or lie outside of the planes.
    """

    planes: Sequence[Plane]
    places: Sequence[Place]
    chunks: Sequence[ChunkTensors | None]
    tables: Sequence[Table]
    skip: Sequence[int] = ()

    def __post_init__(self) -> None:
        if not self.planes or len(self.chunks) != len(self.places):
            raise ValueError(f"{len(self.places)} places need as many chunks, and at least one plane")
        if any(a.start + a.tokens > b.start for a, b in pairwise(self.places)):
            raise ValueError("places must be ascending and must not overlap")
        if self.places and (self.places[0].start < 0 or any(p.tokens < 1 for p in self.places)):
            raise ValueError("a place starts at 0 or later and has at least one token")
        for plane in self.planes:
            _check_plane(plane, self.stop, self.tables)
        for place, chunk in zip(self.places, self.chunks, strict=True):
            if chunk is not None and chunk.tensors[0].shape[1] < place.first + place.tokens:
                size, last = chunk.tensors[0].shape[1], place.first + place.tokens
                raise ValueError(f"a chunk of {size} tokens has no {last}")
        for chunk in self.kinds:
            _check_chunk(chunk, self.planes)

    @property
    def kinds(self) -> list[ChunkTensors]:
        """One chunk for each set of formats."""
        return list({chunk.signature: chunk for chunk in self.chunks if chunk is not None}.values())

    @property
    def stop(self) -> int:
        """Position after the last place."""
        return self.places[-1].start + self.places[-1].tokens if self.places else 0

    def formats(self, piece: int) -> tuple[Format, ...]:
        """Formats per plane of one chunk's tensors, or of the planes if it is in them already."""
        chunk = self.chunks[piece]
        return tuple(_format(p.kv, None) for p in self.planes) if chunk is None else chunk.formats

    def turn(self, plane: Plane, place: Place) -> Table | None:
        """Rotation of one place in one plane, None if it is not rotated."""
        if plane.table is None or place.rotated:
            return None
        at = slice(place.start, place.start + place.tokens)
        cos, sin = self.tables[plane.table]
        return cos[at], sin[at]


def _check_plane(plane: Plane, stop: int, tables: Sequence[Table]) -> None:
    if plane.kv.dim() != 3 or plane.kv.shape[1] < stop:
        raise ValueError(f"places end at {stop}; a plane of shape {tuple(plane.kv.shape)} does not hold that")
    _check_rows(plane.kv)
    if plane.table is None:
        return
    cos, sin = tables[plane.table]
    if cos.shape != sin.shape or cos.shape[0] < stop or not (cos.is_contiguous() and sin.is_contiguous()):
        raise ValueError(f"cos and sin must be contiguous and of equal shape, with {stop} rows or more")
    if plane.offset + 2 * cos.shape[1] > plane.kv.shape[2]:
        raise ValueError(f"{cos.shape[1]} pairs from {plane.offset} on do not fit into {plane.kv.shape[2]}")


def _check_chunk(chunk: ChunkTensors, planes: Sequence[Plane]) -> None:
    if len(chunk.tensors) != len(planes) or len(chunk.scales) not in (0, len(planes)):
        raise ValueError(f"{len(planes)} planes need a chunk of as many tensors, not {len(chunk.tensors)}")
    for plane, has in zip(planes, chunk.formats, strict=True):
        if plane.kv.shape[0] != has.heads or plane.kv.shape[2] != has.dim:
            raise ValueError(f"a chunk of {has.heads} heads x {has.dim} for a plane {tuple(plane.kv.shape)}")


def _check_rows(tensor: torch.Tensor) -> None:
    if tensor.stride(2) != 1 or (tensor.shape[1] > 1 and tensor.stride(1) != tensor.shape[2]):
        raise ValueError(f"rows must be contiguous; the strides are {tensor.stride()}: call .contiguous()")


def _format(tensor: torch.Tensor, scale: torch.Tensor | None) -> Format:
    if tensor.dim() != 3:
        raise ValueError(f"[heads, tokens, dim] is wanted, not {tuple(tensor.shape)}")
    _check_rows(tensor)
    heads, tokens, dim = tensor.shape
    if scale is not None:
        if scale.shape not in ((heads, 1, dim), (heads, tokens, 1)) or not scale.is_contiguous():
            raise ValueError(f"scales of shape {tuple(scale.shape)} for a tensor {tuple(tensor.shape)}")
        if scale.dtype != torch.float32:
            raise ValueError(f"scales must be float32, not {scale.dtype}")
    whole = aligned(tensor) and (scale is None or scale.data_ptr() % 16 == 0)
    return Format(heads, dim, tensor.dtype, scale is not None, whole)


def aligned(tensor: torch.Tensor) -> bool:
    """Whether every row of ``[heads, rows, dim]`` starts at a multiple of 16 bytes."""
    size = tensor.element_size()
    steps = (tensor.data_ptr(), tensor.stride(0) * size, tensor.stride(1) * size)
    return not any(step % 16 for step in steps)


def _entry(tensor: torch.Tensor, scale: torch.Tensor | None) -> tuple[int, ...]:
    if scale is None:
        return tensor.data_ptr(), tensor.stride()[0], 0, 0, 0, 0
    per_channel = scale.shape[1] == 1 and scale.shape[2] == tensor.shape[2]
    steps = (0, 1) if per_channel else (1, 0)
    return tensor.data_ptr(), tensor.stride(0), scale.data_ptr(), scale.stride(0), *steps
