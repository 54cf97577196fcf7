"""The image of an entry in memory: byte for byte what the disk tier would write to its file."""

from __future__ import annotations

import google_crc32c
import numpy as np
import numpy.typing as npt
import torch

from ragcachekit.model.kv import ChunkKV
from ragcachekit.store.entry_header import (
    EntryDamaged,
    EntryHeader,
    LayerSpec,
    SealedSpec,
    TensorSpec,
    decode_header,
    encode_header,
    header_size,
)
from ragcachekit.store.entry_tensors import as_tensor, split
from ragcachekit.types import KVKey

Bytes = npt.NDArray[np.uint8]


def to_bytes(key: KVKey, kv: ChunkKV) -> list[bytes | memoryview]:
    """The parts whose concatenation is the entry of ``key``: header, then keys and values, then sums.

    Parts, not one string: whoever signs and sends them copies them once, not twice.

    Raises
    ------
    TypeError
        For KV of a dtype that safetensors does not know.
    """
    pairs = [(_raw(k), _raw(v)) for k, v in zip(kv.keys, kv.values, strict=True)]
    layers = tuple(
        LayerSpec(TensorSpec.of(k), TensorSpec.of(v), _crc(*raws))
        for k, v, raws in zip(kv.keys, kv.values, pairs, strict=True)
    )
    named = sorted(kv.sums.items())
    sums = [_raw(tensor) for _, tensor in named]
    specs = tuple(
        SealedSpec(name, TensorSpec.of(tensor), _crc(raw))
        for (name, tensor), raw in zip(named, sums, strict=True)
    )
    header = encode_header(EntryHeader(key, kv.start, layers, specs, kv.quantised))
    return [header, *(raw.data for pair in pairs for raw in pair), *(raw.data for raw in sums)]


def from_bytes(image: memoryview, key: KVKey) -> ChunkKV:
    """The KV in ``image``, in memory of its own.

    Raises
    ------
    EntryDamaged
        Unless every byte is as :func:`to_bytes` made it for exactly this key.
    """
    header, start = _header(image, len(image))
    if header.key != key:
        raise EntryDamaged("the entry of another key")
    if start + header.nbytes != len(image):
        raise EntryDamaged(f"{len(image)} bytes instead of {start + header.nbytes}")
    raw = torch.from_numpy(np.frombuffer(image, np.uint8, offset=start).copy())
    keys, values = split(raw[: sum(layer.nbytes for layer in header.layers)], header.layers)
    offset = 0
    for layer in header.layers:
        _check(raw[offset : offset + layer.nbytes], layer.crc32c)
        offset += layer.nbytes
    sums = {}
    for sealed in header.sums:
        part = raw[offset : offset + sealed.nbytes]
        _check(part, sealed.crc32c)
        sums[sealed.name] = as_tensor(part, sealed.tensor)
        offset += sealed.nbytes
    return ChunkKV(tuple(keys), tuple(values), header.start, sums, header.quantised)


def key_in(beginning: memoryview, size: int) -> KVKey | None:
    """Whose entry of ``size`` bytes starts like this; None if the header goes on behind ``beginning``.

    Raises
    ------
    EntryDamaged
        Unless every byte of the header is as it was written.
    """
    if header_size(bytes(beginning[:8]), size) > len(beginning):
        return None
    return _header(beginning, size)[0].key


def _header(image: memoryview, size: int) -> tuple[EntryHeader, int]:
    end = header_size(bytes(image[:8]), size)
    return decode_header(bytes(image[:end])), end


def _raw(tensor: torch.Tensor) -> Bytes:
    raw: Bytes = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return raw


def _check(raw: torch.Tensor, crc32c: int) -> None:
    if _crc(raw.numpy()) != crc32c:
        raise EntryDamaged("tensors do not match their CRC")


def _crc(*parts: Bytes) -> int:
    crc = 0
    for part in parts:
        crc = google_crc32c.extend(crc, part)
    return int(crc)
