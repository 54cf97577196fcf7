"""Assembly, disassembly and scatter: choice of the implementation.

Import from :mod:`ragcachekit_kernels.dispatch`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial

import torch

from ragcachekit_kernels import reference
from ragcachekit_kernels.backend import DTYPES, uses_triton
from ragcachekit_kernels.fallback import attempt, refusal
from ragcachekit_kernels.placement.planes import Assembly, ChunkTensors, Layout, Place, Plane, Table
from ragcachekit_kernels.rows import DeviceRows, KVTable, Rows

ROUNDED = (torch.int8, torch.float8_e4m3fn)


def moving_choice(layout: Layout) -> str:
    """Implementation for a layout: ``triton``, ``torch``, or ``torch: `` and why not Triton."""
    device = layout.planes[0].kv.device
    if not uses_triton(device):
        return "torch"
    kv = {plane.kv.dtype for plane in layout.planes}
    kinds = layout.kinds
    chunks = {f.dtype for chunk in kinds for f in chunk.formats if not f.scaled}
    rounded = {f.dtype for chunk in kinds for f in chunk.formats if f.scaled}
    for dtype in sorted((kv | chunks) - set(DTYPES) | rounded - set(ROUNDED), key=str):
        return f"torch: {dtype}".replace("torch.", "")
    if any(cos.dtype != torch.float32 for cos, _ in layout.tables):
        return "torch: cosines are not float32"
    elsewhere = {t.device for chunk in kinds for t in chunk.tensors} - {device}
    if elsewhere:
        return f"torch: chunks on {elsewhere.pop()}"
    refused = refusal(_case(layout))
    return f"torch: {refused}" if refused else "triton"


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
    if not places or moving_choice(layout) != "triton":
        return _Attempted(layout)
    from ragcachekit_kernels.placement.assembly import TritonAssembly

    kernels = TritonAssembly(layout)
    # A rotation in place must not be started twice, so there is no fallback.
    return kernels if None in layout.chunks else _Attempted(layout, kernels)


def assemble(
    planes: Sequence[Plane],
    places: Sequence[Place],
    chunks: Sequence[ChunkTensors | None],
    tables: Sequence[Table],
    *,
    skip: Sequence[int] = (),
) -> None:
    """Copy chunks' tensors into a request's KV; arguments and errors as for :func:`assembly`."""
    assembly(planes, places, chunks, tables, skip=skip).run()


def disassemble(
    planes: Sequence[Plane],
    places: Sequence[Place],
    chunks: Sequence[ChunkTensors],
    tables: Sequence[Table],
) -> None:
    """Inverse of :func:`assemble`, for storing: copy pieces of a request's KV into chunks' tensors.

    Arguments as for :func:`assembly`, except that ``chunks`` are written to and ``tables`` hold the inverse
    rotation (cos / m and -sin / m). int8 and fp8 tensors are quantised, and their scales are written. Discard
    tensors whose scales are not finite: the KV was not.
    """
    layout = Layout(planes, places, chunks, tables)
    if not places or moving_choice(layout) != "triton":
        reference.disassemble(layout)
        return
    from ragcachekit_kernels.placement.storing import disassemble as kernels

    attempt(_case(layout), partial(kernels, layout), partial(reference.disassemble, layout))


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
    if not positions:
        return
    rows = positions if isinstance(positions, Rows) else Rows(tuple(positions))
    if rows[-1] >= min(into_key.shape[1], into_value.shape[1]):
        raise ValueError(f"position {rows[-1]} lies outside of {into_key.shape[1]} slots")
    in_torch = partial(reference.scatter, key, value, into_key, into_value, rows.positions)
    if not uses_triton(key.device) or {t.dtype for t in (key, value, into_key, into_value)} - set(DTYPES):
        in_torch()
        return
    from ragcachekit_kernels.placement.scatter import scatter as kernel

    case = "scatter", str(key.device), str(key.dtype), str(into_key.dtype), key.shape[2], value.shape[2]
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
    if not uses_triton(key.device):
        raise ValueError(f"rows through a KV table need Triton, which does not run on {key.device}")
    if table.dtype not in DTYPES or {key.dtype, value.dtype} - set(DTYPES):
        raise ValueError(
            f"rows through a KV table must be bfloat16, float16 or float32, got {key.dtype}, {value.dtype} "
            f"into {table.dtype}"
        )
    from ragcachekit_kernels.placement.scatter import scatter_at as kernel

    kernel(key, value, table, layer, rows)


class _Attempted:
    """Assembly by the kernels, if given and not refused, else by the reference."""

    def __init__(self, layout: Layout, kernels: Assembly | None = None) -> None:
        self._layout, self._kernels = layout, kernels

    def run(self, first: int = 0, last: int | None = None) -> None:
        in_torch = partial(reference.assemble, self._layout, first, last)
        if self._kernels is None:
            in_torch()
        else:
            attempt(_case(self._layout), partial(self._kernels.run, first, last), in_torch)


def _case(layout: Layout) -> Hashable:
    kv = {(str(plane.kv.dtype), plane.kv.shape[2]) for plane in layout.planes}
    chunks = {(str(f.dtype), f.dim) for chunk in layout.kinds for f in chunk.formats}
    return "moving", str(layout.planes[0].kv.device), frozenset(kv), frozenset(chunks)
