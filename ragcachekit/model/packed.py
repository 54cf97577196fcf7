"""KV in eight bits: as quantised tiers store it, unpacked for all other uses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property

import torch

from ragcachekit.model.kv import SCALE_OF_KEYS, SCALE_OF_VALUES, ChunkKV, TensorShape, is_packed, scales_of

LIKE = "like"  # name in the sums of packed KV: an empty tensor of the original dtype

Sums = Mapping[str, torch.Tensor]


def is_well_packed(shapes: Sequence[tuple[TensorShape, TensorShape]], sums: Sums) -> bool:
    """Whether KV of these shapes has its original dtype and a scale for every layer."""
    if LIKE not in sums:
        return False
    for number, ((_, keys), (_, values)) in enumerate(shapes):
        of_keys, of_values = (sums.get(f"{name}{number}") for name in (SCALE_OF_KEYS, SCALE_OF_VALUES))
        if of_keys is None or of_keys.shape != (keys[0], 1, keys[2]):
            return False
        if of_values is None or of_values.shape != (*values[:2], 1):
            return False
    return True


def own_sums(sums: Sums) -> Sums:
    """Sums without scales and dtype; the same object if the KV is not packed."""
    if not is_packed(sums):
        return sums
    scales = (SCALE_OF_KEYS, SCALE_OF_VALUES)
    return {name: t for name, t in sums.items() if not name.startswith(scales) and name != LIKE}


def unpacked_layer(
    number: int, keys: torch.Tensor, values: torch.Tensor, sums: Sums
) -> tuple[torch.Tensor, torch.Tensor]:
    """One layer in its original dtype."""
    dtype = sums[LIKE].dtype
    of_keys, of_values = scales_of(sums, number)
    wide = keys.float() * of_keys.to(keys.device)
    return wide.to(dtype), (values.float() * of_values.to(values.device)).to(dtype)


def unpack(packed: ChunkKV, kind: str) -> ChunkKV:
    """Unpacked KV in its original dtype, marked as ``quantised``."""
    layers = [unpacked_layer(i, packed.keys[i], packed.values[i], packed.sums) for i in range(packed.layers)]
    keys, values = tuple(k for k, _ in layers), tuple(v for _, v in layers)
    return ChunkKV(keys, values, packed.start, own_sums(packed.sums), kind)


def unpacked_shapes(
    shapes: Sequence[tuple[TensorShape, TensorShape]], sums: Sums
) -> tuple[tuple[TensorShape, TensorShape], ...]:
    """Dtype and shape of unpacked keys and values, per layer."""
    dtype = sums[LIKE].dtype
    return tuple(((dtype, keys), (dtype, values)) for (_, keys), (_, values) in shapes)


class PackedKV(ChunkKV):
    """KV in eight bits, unpacked as a whole when its tensors are first read.

    Linking reads ``stored_layer`` instead, so only eight bits are copied to a GPU.
    """

    _packed: ChunkKV

    @classmethod
    def of(cls, packed: ChunkKV, kind: str) -> PackedKV:
        made = object.__new__(cls)
        made.__dict__.update(_packed=packed, start=packed.start, sums=own_sums(packed.sums), quantised=kind)
        return made

    @cached_property
    def _plain(self) -> ChunkKV:
        return unpack(self._packed, self.quantised)

    def unpacked(self) -> ChunkKV:
        return self._plain

    @property
    def keys(self) -> tuple[torch.Tensor, ...]:
        return self._plain.keys

    @property
    def values(self) -> tuple[torch.Tensor, ...]:
        return self._plain.values

    @property
    def tokens(self) -> int:
        return self._packed.tokens

    @property
    def layers(self) -> int:
        return self._packed.layers

    @cached_property
    def shapes(self) -> tuple[tuple[TensorShape, TensorShape], ...]:
        return unpacked_shapes(self._packed.shapes, self._packed.sums)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all tensors after unpacking."""
        sides = sum(dtype.itemsize * math.prod(shape) for pair in self.shapes for dtype, shape in pair)
        return sides + sum(t.nbytes for t in self.sums.values())

    def stored_layer(self, number: int) -> tuple[torch.Tensor, ...]:
        return self._packed.stored_layer(number)
