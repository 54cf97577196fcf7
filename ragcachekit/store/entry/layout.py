"""Types, shapes and offsets of an entry's tensors, cached: entries of equal length share them."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, groupby

import torch

from ragcachekit.files import parse_json
from ragcachekit.model.kv import ChunkKV

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
    """Keys and values of all layers in order, keys first; made by :meth:`of` and :meth:`read`."""

    groups: tuple[tuple[int, TensorSpec, TensorSpec], ...]  # number of equal layers, keys, values

    @staticmethod
    def of(kv: ChunkKV) -> Layout:
        """The layout of ``kv``; TypeError for a dtype without a safetensors name."""
        runs = [(len(list(same)), *pair) for pair, same in groupby(kv.shapes)]
        specs = [(n, *(TensorSpec(storable(kind), shape) for kind, shape in pair)) for n, *pair in runs]
        return _shared(tuple((count, keys, values) for count, keys, values in specs))

    @staticmethod
    def read(text: str) -> Layout:
        """The reverse of :attr:`text`; KeyError, TypeError or ValueError for other text."""
        return _read(text)

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
def _read(text: str) -> Layout:
    groups = tuple(
        (count, spec_of(keys, keys_shape), spec_of(values, values_shape))
        for count, keys, keys_shape, values, values_shape in parse_json(text)
    )
    # By type: 2.0 and True equal 2 and 1, and the layout is shared with other entries.
    if any(type(count) is not int or not 0 < count <= _MOST_LAYERS for count, _, _ in groups):
        raise ValueError("a number of layers that is none")
    shapes = [spec.shape for _, keys, values in groups for spec in (keys, values)]
    if {len(shape) for shape in shapes} != {3} or len({shape[1] for shape in shapes}) != 1:
        raise ValueError("no layers of [kv_heads, tokens, head_dim] with the same tokens")
    layout = _shared(groups)
    if layout.layers > _MOST_LAYERS or layout.text != text:
        raise ValueError("layers that nobody wrote")
    return layout


def spec_of(dtype: str, shape: list[int]) -> TensorSpec:
    """The spec of a dtype's name and a shape; KeyError, TypeError or ValueError for bad ones."""
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError("a shape that is none")
    if len(shape) > _MOST_DIMS or math.prod(n or 1 for n in shape) > _MOST_NUMBERS:
        raise ValueError("a shape that no memory holds")
    return TensorSpec(DTYPES[dtype], tuple(shape))
