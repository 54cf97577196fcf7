"""Types, shapes and offsets of an entry's tensors, and their conversion from and to raw bytes.

Layouts are cached: entries of equal length share them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, groupby

import google_crc32c
import numpy as np
import numpy.typing as npt
import torch

from ragcachekit.files import parse_json
from ragcachekit.model.kv import ChunkKV

Array = npt.NDArray[np.uint8]

_PIECE = 1 << 19  # bytes per write
_KEPT = 256  # layouts, of some ten KB each
_MOST_LAYERS = 1 << 16
_MOST_DIMS = 64  # of torch
_MOST_NUMBERS = 1 << 40  # zeros in a shape counted as ones, so that strides do not overflow
_COMPACT = json.JSONEncoder(separators=(",", ":")).encode

NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
    torch.uint8: "U8",
}
"""Names of dtypes in safetensors."""

_NUMPY_DTYPES = {torch.float64, torch.float32, torch.float16, torch.int8, torch.uint8}

DTYPES = {name: dtype for dtype, name in NAMES.items()}


def storable(dtype: torch.dtype) -> torch.dtype:
    """``dtype`` itself; TypeError if it has no safetensors name."""
    if dtype not in NAMES:
        raise TypeError(f"KV of {dtype} cannot be stored; cast it to one of {', '.join(map(str, NAMES))}")
    return dtype


@dataclass(frozen=True)
class TensorSpec:
    """Type and shape of one stored tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the raw tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    def entry(self, name: str, offset: int) -> str:
        """This tensor's entry in a safetensors header, with its offset after the header."""
        shape, end = ",".join(map(str, self.shape)), offset + self.nbytes
        kind = NAMES[self.dtype]
        return f'{_COMPACT(name)}:{{"dtype":"{kind}","shape":[{shape}],"data_offsets":[{offset},{end}]}}'


Shape = tuple[torch.dtype, tuple[int, ...]]


@dataclass(frozen=True)
class Layout:
    """Keys and values of all layers in order, keys first; made by :meth:`of` and :func:`read_layout`."""

    groups: tuple[tuple[int, TensorSpec, TensorSpec], ...]  # number of equal layers, keys, values

    @staticmethod
    def of(kv: ChunkKV) -> Layout:
        """The layout of ``kv``; TypeError for a dtype without a safetensors name."""
        runs = [(len(list(same)), *pair) for pair, same in groupby(kv.shapes)]
        specs = [(n, *(TensorSpec(storable(kind), shape) for kind, shape in pair)) for n, *pair in runs]
        return _shared(tuple((count, keys, values) for count, keys, values in specs))

    @cached_property
    def text(self) -> str:
        """The layout as short JSON."""
        return _COMPACT([[n, NAMES[k.dtype], k.shape, NAMES[v.dtype], v.shape] for n, k, v in self.groups])

    @cached_property
    def layers(self) -> int:
        """Number of layers."""
        return sum(count for count, _, _ in self.groups)

    @cached_property
    def pairs(self) -> tuple[tuple[TensorSpec, TensorSpec], ...]:
        """Keys and values of each layer."""
        return tuple(pair for count, keys, values in self.groups for pair in [(keys, values)] * count)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Begin of each layer in bytes after the header, and the end of the last one."""
        return tuple(accumulate((keys.nbytes + values.nbytes for keys, values in self.pairs), initial=0))

    @property
    def nbytes(self) -> int:
        """Bytes of all layers."""
        return self.offsets[-1]

    @cached_property
    def shapes(self) -> tuple[tuple[Shape, Shape], ...]:
        """Dtype and shape of keys and values, per layer."""
        return tuple(((k.dtype, k.shape), (v.dtype, v.shape)) for k, v in self.pairs)

    @cached_property
    def alike(self) -> TensorSpec | None:
        """The spec of every tensor, if they are all the same."""
        first = self.groups[0][1]
        return first if len(self.groups) == 1 and first == self.groups[0][2] else None

    @cached_property
    def entries(self) -> str:
        """The tensors' entries in a safetensors header."""
        named, offset = [], 0
        for number, (keys, values) in enumerate(self.pairs):
            named.append(keys.entry(f"k.{number}", offset))
            named.append(values.entry(f"v.{number}", offset + keys.nbytes))
            offset += keys.nbytes + values.nbytes
        return ",".join(named)


_shared = lru_cache(_KEPT)(Layout)


@lru_cache(_KEPT)
def read_layout(text: str) -> Layout:
    """The reverse of :attr:`Layout.text`; KeyError, TypeError or ValueError for other text."""
    groups = tuple(
        (count, spec_of(keys, keys_shape), spec_of(values, values_shape))
        for count, keys, keys_shape, values, values_shape in parse_json(text)
    )
    # By type: 2.0 and True equal 2 and 1, and the layout is shared with other entries.
    if any(type(count) is not int or not 0 < count <= _MOST_LAYERS for count, _, _ in groups):
        raise ValueError("a bad number of layers")
    shapes = [spec.shape for _, keys, values in groups for spec in (keys, values)]
    if {len(shape) for shape in shapes} != {3} or len({shape[1] for shape in shapes}) != 1:
        raise ValueError("no layers of [kv_heads, tokens, head_dim] with the same tokens")
    layout = _shared(groups)
    if layout.layers > _MOST_LAYERS or layout.text != text:
        raise ValueError("another text than that of its layers")
    return layout


def spec_of(dtype: str, shape: list[int]) -> TensorSpec:
    """The spec of a dtype's name and a shape; KeyError, TypeError or ValueError for bad ones."""
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError("a bad shape")
    if len(shape) > _MOST_DIMS or math.prod(n or 1 for n in shape) > _MOST_NUMBERS:
        raise ValueError("a shape that no memory holds")
    return TensorSpec(DTYPES[dtype], tuple(shape))


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
        end_at = middle + value.nbytes
        keys.append(as_tensor(raw[at:middle], key))
        values.append(as_tensor(raw[middle:end_at], value))
        at = end_at
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
    if tensor.dtype not in _NUMPY_DTYPES:
        tensor = tensor.reshape(-1).view(torch.uint8)
    return tensor.numpy().reshape(-1).view(np.uint8)
