"""Assembly, disassembly and scatter: choice of the implementation.

Import from :mod:`ragcachekit_kernels.dispatch`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial

import torch

from ragcachekit_kernels import reference
from ragcachekit_kernels.backend import DTYPES, attempt, case_of, refusal, uses_triton
from ragcachekit_kernels.placement.planes import ChunkTensors, Layout, Place, Plane, Table
from ragcachekit_kernels.rows import DeviceRows, KVTable, rows_within

ROUNDED = (torch.int8, torch.float8_e4m3fn)


class Assembly:
    """Prepared copy of chunks into a request's KV: by ``kernels(first, last)`` if given, else in torch."""

    def __init__(self, layout: Layout, kernels: Callable[[int, int | None], None] | None = None) -> None:
        self._layout, self._kernels = layout, kernels

    def run(self, first: int = 0, last: int | None = None) -> None:
        """Copy planes ``first .. last - 1`` (None: all that follow) on the current stream."""
        in_torch = partial(reference.assemble, self._layout, first, last)
        if self._kernels is None:
            in_torch()
        elif None in self._layout.chunks:  # a rotation in place must not be started twice: no fallback
            self._kernels(first, last)
        else:
            attempt(_case(self._layout), partial(self._kernels, first, last), in_torch)


def assembly(
    planes: Sequence[Plane],
    places: Sequence[Place],
    chunks: Sequence[ChunkTensors | None],
    tables: Sequence[Table],
    *,
    skip: Sequence[int] = (),
) -> Assembly:
    """Prepared copy of chunks' tensors into a request's KV; its ``run`` copies.

    Parameters
    ----------
    planes : sequence of Plane
        Keys and values of each layer, best in the order of the layers: ``run(first, last)`` copies a range of
        planes, while later layers are still being loaded.
    places : sequence of Place
        Ascending, not overlapping.
    chunks : sequence of (ChunkTensors or None)
        One per place, tensors in the order of the planes and on their device. int8 and fp8 tensors are
        multiplied by their scales. None: the piece is in the planes already and is rotated there; run that
        once only.
    tables : sequence of (cos, sin)
        Float32 ``[positions, pairs]`` for positions 0, 1, 2, ..., multiplied by the attention factor.
    skip : sequence of int
        Ascending positions that are not written, since they will be computed; any outside of places are
        ignored.

    Returns
    -------
    Assembly
        On a GPU, ``run`` is one launch for all planes and places of one shape and dtype. Its stream must be
        the one that was current here, or wait for it.

    Raises
    ------
    ValueError
        If shapes do not fit together, or places overlap or lie outside of the planes.
    """
    layout = Layout(planes, places, chunks, tables, skip)
    if not _has_kernels(layout):
        return Assembly(layout)
    from ragcachekit_kernels.placement.assembly import TritonAssembly

    return Assembly(layout, TritonAssembly(layout).run)


def disassemble(
    planes: Sequence[Plane],
    places: Sequence[Place],
    chunks: Sequence[ChunkTensors],
    tables: Sequence[Table],
) -> None:
    """Inverse of :func:`assembly`, for storing: copy pieces of a request's KV into chunks' tensors.

    Arguments as for :func:`assembly`, except that ``chunks`` are written to and ``tables`` hold the inverse
    rotation (cos / m and -sin / m). int8 and fp8 tensors are quantised, and their scales are written. Discard
    tensors whose scales are not finite: the KV was not.
    """
    layout = Layout(planes, places, chunks, tables)
    in_torch = partial(reference.disassemble, layout)
    if not _has_kernels(layout):
        in_torch()
        return
    from ragcachekit_kernels.placement.storing import disassemble as kernels

    attempt(_case(layout), partial(kernels, layout), in_torch)


def scatter(
    key: torch.Tensor,
    value: torch.Tensor,
    into_key: torch.Tensor,
    into_value: torch.Tensor,
    positions: Sequence[int],
) -> None:
    """Write rows into a request's KV in place, with one launch for keys and values.

    Parameters
    ----------
    key, value : torch.Tensor
        ``[kv_heads, rows, dim]``, strides free.
    into_key, into_value : torch.Tensor
        ``[kv_heads, slots, dim]``, rows contiguous.
    positions : sequence of int
        Ascending slots of the rows; :class:`Rows` are copied to the device only once.

    Raises
    ------
    ValueError
        If shapes do not fit, or positions are not ascending or lie outside of the slots.
    """
    if key.shape[1] != len(positions) or value.shape[1] != len(positions):
        raise ValueError(
            f"{key.shape[1]} rows of keys, {value.shape[1]} of values, {len(positions)} positions"
        )
    if any(x.shape[::2] != y.shape[::2] for x, y in ((key, into_key), (value, into_value))):
        raise ValueError(
            f"heads and dimensions of {tuple(key.shape)} and {tuple(value.shape)} are not those of "
            f"{tuple(into_key.shape)} and {tuple(into_value.shape)}"
        )
    rows = rows_within(positions, min(into_key.shape[1], into_value.shape[1]))
    if not rows:
        return
    in_torch = partial(reference.scatter, key, value, into_key, into_value, rows.positions)
    if not uses_triton(key.device) or {t.dtype for t in (key, value, into_key, into_value)} - set(DTYPES):
        in_torch()
        return
    from ragcachekit_kernels.placement.scatter import scatter as kernel

    case = case_of("scatter", key, value, into_key)
    attempt(case, partial(kernel, key, value, into_key, into_value, rows.on(key.device)), in_torch)


def scatter_at(key: torch.Tensor, value: torch.Tensor, table: KVTable, layer: int, rows: DeviceRows) -> None:
    """Scatter for captured graphs, to the addresses in ``table`` at the time that the kernel runs.

    ``key`` and ``value`` have ``rows.room`` rows; those from ``rows.count`` on are not written.

    Raises
    ------
    ValueError
        If Triton does not run on this device or does not support the types, or there are not ``rows.room``
        rows.
    """
    if key.shape[1] != rows.room or value.shape[1] != rows.room:
        raise ValueError(f"{key.shape[1]} and {value.shape[1]} rows where there is room for {rows.room}")
    table.check(key, value)
    from ragcachekit_kernels.placement.scatter import scatter_at as kernel

    kernel(key, value, table, layer, rows)


def _has_kernels(layout: Layout) -> bool:
    """Whether the Triton kernels move this layout, as far as is known."""
    device, kinds = layout.planes[0].kv.device, layout.kinds
    if not layout.places or not uses_triton(device) or refusal(_case(layout)):
        return False
    plain = {plane.kv.dtype for plane in layout.planes}
    plain |= {f.dtype for chunk in kinds for f in chunk.formats if not f.scaled}
    rounded = {f.dtype for chunk in kinds for f in chunk.formats if f.scaled}
    return (
        plain <= set(DTYPES)
        and rounded <= set(ROUNDED)
        and all(cos.dtype == torch.float32 for cos, _ in layout.tables)
        and all(tensor.device == device for chunk in kinds for tensor in chunk.tensors)
    )


def _case(layout: Layout) -> Hashable:
    kv = {(str(plane.kv.dtype), plane.kv.shape[2]) for plane in layout.planes}
    chunks = {(str(f.dtype), f.dim) for chunk in layout.kinds for f in chunk.formats}
    return "moving", str(layout.planes[0].kv.device), frozenset(kv), frozenset(chunks)
