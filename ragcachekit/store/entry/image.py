"""An entry in memory, byte for byte as the disk tier writes it to its file."""

from __future__ import annotations

import google_crc32c
import numpy as np
import torch

from ragcachekit.model.kv import ChunkKV
from ragcachekit.store.entry.header import (
    EntryDamaged,
    EntryHeader,
    SealedSpec,
    decode_header,
    encode_header,
    header_size,
    set_crcs,
)
from ragcachekit.store.entry.layout import (
    Array,
    Layout,
    RawLayers,
    TensorSpec,
    as_array,
    as_tensor,
    split,
    storable,
)
from ragcachekit.types import KVKey


def to_bytes(key: KVKey, kv: ChunkKV) -> list[bytes | memoryview]:
    """The parts whose concatenation is the entry of ``key``: header, then keys and values, then sums.

    TypeError for KV of a dtype without a safetensors name.
    """
    header, sums = outline(key, kv)
    layers = RawLayers(kv, header.layout)
    raws = [raw for piece in layers for raw in piece]
    encoded = encode_header(header)
    set_crcs(encoded, layers.crcs)
    return [bytes(encoded), *(raw.data for raw in (*raws, *sums))]


def outline(key: KVKey, kv: ChunkKV) -> tuple[EntryHeader, list[Array]]:
    """The header of an entry without the CRCs of its layers, and the bytes of its ``sums``."""
    layout = Layout.of(kv)
    named = sorted(kv.sums.items())
    sums = [as_array(tensor) for _, tensor in named]
    specs = tuple(
        SealedSpec(name, TensorSpec(storable(tensor.dtype), tuple(tensor.shape)), google_crc32c.value(raw))
        for (name, tensor), raw in zip(named, sums, strict=True)
    )
    return EntryHeader(key, kv.start, layout, (0,) * layout.layers, specs, kv.quantised), sums


def from_bytes(image: memoryview, key: KVKey) -> ChunkKV:
    """A copy of the KV in ``image``; EntryDamaged unless :func:`to_bytes` made every byte for this key."""
    header, start = _header(image, len(image))
    if header.key != key:
        raise EntryDamaged("the entry of another key")
    if start + header.nbytes != len(image):
        raise EntryDamaged(f"{len(image)} bytes instead of {start + header.nbytes}")
    raw = torch.from_numpy(np.frombuffer(image, np.uint8, offset=start).copy())
    layout, offset = header.layout, header.layout.nbytes
    _check(raw[:offset], header.crcs[-1])
    keys, values = split(raw[:offset], layout, 0, layout.layers)
    sums = {}
    for sealed in header.sums:
        part = raw[offset : offset + sealed.nbytes]
        _check(part, sealed.crc32c)
        sums[sealed.name] = as_tensor(part, sealed.tensor)
        offset += sealed.nbytes
    return ChunkKV(tuple(keys), tuple(values), header.start, sums, header.quantised)


def key_in(beginning: memoryview, size: int) -> KVKey | None:
    """The key of an entry of ``size`` bytes, verified; None if the header is longer than ``beginning``."""
    if header_size(bytes(beginning[:8]), size) > len(beginning):
        return None
    return _header(beginning, size)[0].key


def _header(image: memoryview, size: int) -> tuple[EntryHeader, int]:
    end = header_size(bytes(image[:8]), size)
    return decode_header(bytes(image[:end])), end


def _check(raw: torch.Tensor, crc32c: int) -> None:
    if google_crc32c.value(raw.numpy()) != crc32c:
        raise EntryDamaged("tensors do not match their CRC")
