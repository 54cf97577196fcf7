"""Conversion between raw bytes and tensors without copying."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import google_crc32c
import numpy as np
import numpy.typing as npt
import torch

from ragcachekit.model.kv import ChunkKV
from ragcachekit.store.entry.layout import Layout, TensorSpec

Array = npt.NDArray[np.uint8]

_PIECE = 1 << 19  # bytes per write
_NUMPY_KNOWS = {torch.float64, torch.float32, torch.float16, torch.int8, torch.uint8}


def split(
    raw: torch.Tensor, layout: Layout, begin: int, end: int
) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
    """Keys and values of the layers from ``begin`` to ``end``, adjacent in ``raw``."""
    kind = layout.alike
    if kind is not None:  # all tensors in one step, not three for each
        every = as_tensor(raw, TensorSpec(kind.dtype, (2 * (end - begin), *kind.shape))).unbind()
        return every[::2], every[1::2]
    keys, values, at = [], [], 0
    for key, value in layout.pairs[begin:end]:
        middle = at + key.nbytes
        behind = middle + value.nbytes
        keys.append(as_tensor(raw[at:middle], key))
        values.append(as_tensor(raw[middle:behind], value))
        at = behind
    return keys, values


def as_tensor(raw: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """One tensor from its bytes."""
    if not raw.numel():
        return torch.empty(spec.shape, dtype=spec.dtype)
    if raw.data_ptr() % spec.dtype.itemsize:
        raw = raw.clone()  # not aligned
    return raw.view(spec.dtype).reshape(spec.shape)


class RawLayers:
    """The bytes of all layers in order, a few layers at a time.

    ``crcs`` are the running CRCs at each layer's end, complete after the iteration. Those of a piece are
    computed after it was written.
    """

    def __init__(self, kv: ChunkKV, layout: Layout) -> None:
        self._kv, self._layout = kv, layout
        self.crcs: list[int] = []

    def __iter__(self) -> Iterator[list[Array]]:
        self.crcs, crc, layout = [], 0, self._layout
        step = max(1, _PIECE * layout.layers // max(1, layout.nbytes))
        for begin in range(0, layout.layers, step):
            some = slice(begin, begin + step)
            pairs = zip(self._kv.keys[some], self._kv.values[some], strict=True)
            raws = [as_array(tensor) for pair in pairs for tensor in pair]
            yield raws
            crcs = tuple(accumulate(raws, google_crc32c.extend, initial=crc))
            self.crcs += crcs[2::2]
            crc = crcs[-1]


def as_array(tensor: torch.Tensor) -> Array:
    """The bytes of one tensor, in its own memory if that is contiguous and the CPU's."""
    # Each call below costs as much as all these checks.
    if tensor.requires_grad or not tensor.is_cpu or not tensor.is_contiguous():
        tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype not in _NUMPY_KNOWS:
        tensor = tensor.reshape(-1).view(torch.uint8)
    return tensor.numpy().reshape(-1).view(np.uint8)
