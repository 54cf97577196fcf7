"""Where tensors are moved: chunks' into a request's KV and back, and computed rows into it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial

import torch

from ragcachekit_kernels import reference
from ragcachekit_kernels.backend import uses_triton
from ragcachekit_kernels.fallback import attempt, refusal
from ragcachekit_kernels.planes import Assembly, ChunkTensors, Layout, Place, Plane, Table
from ragcachekit_kernels.rows import DeviceRows, KVTable, Rows

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ROUNDED = (torch.int8, torch.float8_e4m3fn)


def moving_choice(layout: Layout) -> str:
    """Which implementation a layout goes to: ``triton``, ``torch``, or ``torch: `` and why not Triton."""
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
    """Get ready to put chunks' tensors into a request's KV; ``run`` of the result does it.

    Parameters
    ----------
    planes : sequence of Plane
        Where to: the keys and the values of each layer. Planes of one layer are best neighbours (keys of
        layer 0, values of layer 0, keys of layer 1, ...): ``run(first, last)`` does a range of them, so a
        layer can be put in place while later ones are still being loaded.
    places : sequence of Place
        Ascending, not overlapping.
    chunks : sequence of (ChunkTensors or None)
        One per place, its tensors in the order of the planes and on their device. int8 and fp8 tensors are
        multiplied by their scales. None: the piece lies in the planes already, without rotation, and is
        rotated there; do that once.
    tables : sequence of (cos, sin)
        Float32 ``[positions, pairs]`` for positions 0, 1, 2, ..., the factor m multiplied in (and -sin for
        layers that turn backwards).
    skip : sequence of int
        Ascending positions that are not written, since they will be computed; they may lie outside of all
        places.

    Returns
    -------
    Assembly
        On a GPU ``run`` is one launch for all planes and places that share a shape and a dtype. It goes to
        the stream that is current, which must be the one that was current here (or wait for it).

    Raises
    ------
    ValueError
        If shapes do not fit together, or places overlap or lie outside of the planes.
    """
    layout = Layout(planes, places, chunks, tables, skip)
    if not places or moving_choice(layout) != "triton":
        return _Reference(layout)
    from ragcachekit_kernels.assembly import TritonAssembly

    kernels = TritonAssembly(layout)
    # What is rotated where it lies must not be begun twice: for that there is no second way.
    return kernels if None in layout.chunks else _Attempted(layout, kernels)


def assemble(
    planes: Sequence[Plane],
    places: Sequence[Place],
    chunks: Sequence[ChunkTensors | None],
    tables: Sequence[Table],
    *,
    skip: Sequence[int] = (),
) -> None:
    """Put chunks' tensors into a request's KV at once; arguments and errors as of :func:`assembly`."""
    assembly(planes, places, chunks, tables, skip=skip).run()


def disassemble(
    planes: Sequence[Plane],
    places: Sequence[Place],
    chunks: Sequence[ChunkTensors],
    tables: Sequence[Table],
) -> None:
    """The inverse, for storing: copy pieces of a request's KV out into chunks' tensors.

    Arguments as of :func:`assembly`, except that ``chunks`` are written to and ``tables`` hold the inverse
    rotation (cos / m and -sin / m). int8 and fp8 tensors get rounded elements, and their scales are
    written. A scale that is not finite says that the KV was not: such tensors are to be thrown away.
    """
    layout = Layout(planes, places, chunks, tables)
    if not places or moving_choice(layout) != "triton":
        reference.disassemble(layout)
        return
    from ragcachekit_kernels.storing import disassemble as kernels

    attempt(_case(layout), partial(kernels, layout), partial(reference.disassemble, layout))


def scatter(
    key: torch.Tensor,
    value: torch.Tensor,
    into_key: torch.Tensor,
    into_value: torch.Tensor,
    positions: Sequence[int],
) -> None:
    """Write rows into a request's KV, in place; one launch for keys and values.

    Parameters
    ----------
    key, value : torch.Tensor
        ``[kv_heads, rows, dim]``, strides free.
    into_key, into_value : torch.Tensor
        ``[kv_heads, slots, dim]``, rows contiguous.
    positions : sequence of int
        Ascending slots of the rows; :class:`ragcachekit_kernels.rows.Rows` are put on the device only once.
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
    from ragcachekit_kernels.scatter import scatter as kernel

    case = "scatter", str(key.device), str(key.dtype), str(into_key.dtype), key.shape[2], value.shape[2]
    attempt(case, partial(kernel, key, value, into_key, into_value, rows.on(key.device)), in_torch)


def scatter_at(key: torch.Tensor, value: torch.Tensor, table: KVTable, layer: int, rows: DeviceRows) -> None:
    """As :func:`scatter`, to where ``table`` says that the layer's KV lies when the kernel runs.

    For captured graphs, with Triton only. ``key`` and ``value`` have ``rows.room`` rows; those from
    ``rows.count`` on are not written.

    Raises
    ------
    ValueError
        If Triton does not run on this device, the table is of another type than its kernels know, or there
        are not ``rows.room`` rows.
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
    from ragcachekit_kernels.scatter import scatter_at as kernel

    kernel(key, value, table, layer, rows)


class _Reference:
    """The reference, which has nothing to get ready."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    def run(self, first: int = 0, last: int | None = None) -> None:
        reference.assemble(self._layout, first, last)


class _Attempted:
    """Kernels, or the reference where Triton cannot have them; chunks are read and planes written only."""

    def __init__(self, layout: Layout, kernels: Assembly) -> None:
        self._layout, self._kernels, self._case = layout, kernels, _case(layout)

    def run(self, first: int = 0, last: int | None = None) -> None:
        in_torch = partial(reference.assemble, self._layout, first, last)
        attempt(self._case, partial(self._kernels.run, first, last), in_torch)


def _case(layout: Layout) -> Hashable:
    """The formats that kernels are compiled for."""
    kv = {(str(plane.kv.dtype), plane.kv.shape[2]) for plane in layout.planes}
    chunks = {(str(f.dtype), f.dim) for chunk in layout.kinds for f in chunk.formats}
    return "moving", str(layout.planes[0].kv.device), frozenset(kv), frozenset(chunks)
