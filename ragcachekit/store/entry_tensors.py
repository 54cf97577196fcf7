"""From the raw bytes of an entry to its tensors and back, without copying."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import google_crc32c
import numpy as np
import numpy.typing as npt
import torch

from ragcachekit.model.kv import ChunkKV
from ragcachekit.store.entry_layout import Layout, TensorSpec

Array = npt.NDArray[np.uint8]

_TOGETHER = 1 << 21  # bytes
_NUMPY_KNOWS = {torch.float64, torch.float32, torch.float16, torch.int8, torch.uint8}


def split(
    raw: torch.Tensor, layout: Layout, begin: int, end: int
) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
    """Keys and values of the layers from ``begin`` to ``end``, which lie in ``raw`` one behind the other."""
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
    if raw.data_ptr() % spec.dtype.itemsize:
        raw = raw.clone()  # a wider type behind an odd number of narrower ones
    return raw.view(spec.dtype).reshape(spec.shape)


def raw_layers(kv: ChunkKV, layout: Layout) -> tuple[list[Array], tuple[int, ...]]:
    """The bytes of all layers, in some number of arrays, and the running CRC at each layer's end."""
    tensors = [tensor for pair in zip(kv.keys, kv.values, strict=True) for tensor in pair]
    if layout.alike is None or layout.nbytes > _TOGETHER:
        raws = [as_array(tensor) for tensor in tensors]
        return raws, _running(raws)[1::2]
    # To look at sixty small tensors one by one takes longer than to copy them into one.
    raw = as_array(torch.stack(tensors))
    ends = layout.offsets
    middle = ends[layout.layers // 2]
    return [raw[:middle], raw[middle:]], _running([raw[a:b] for a, b in pairwise(ends)])


def as_array(tensor: torch.Tensor) -> Array:
    """The bytes of one tensor: its own memory where that is the CPU's and in order."""
    # Asked first: each of the calls below costs as much as all these questions.
    if tensor.requires_grad or not tensor.is_cpu or not tensor.is_contiguous():
        tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype not in _NUMPY_KNOWS:
        tensor = tensor.reshape(-1).view(torch.uint8)
    return tensor.numpy().reshape(-1).view(np.uint8)


def _running(raws: list[Array]) -> tuple[int, ...]:
    return tuple(accumulate(raws, google_crc32c.extend, initial=0))[1:]
