"""An entry in memory, byte for byte as the disk tier writes it to its file."""

from __future__ import annotations

from collections.abc import Callable

import google_crc32c
import numpy as np
import torch

from ragcachekit.files import write_all
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
    Layout,
    RawLayers,
    TensorSpec,
    as_array,
    as_tensor,
    split,
    storable,
)
from ragcachekit.types import KVKey

At = Callable[[str], None]
"""Called with the name of each step of a write, for tests that interrupt it."""


def nowhere(step: str) -> None:
    """The :data:`At` that does nothing."""


class EntryImage:
    """The bytes of an entry, ``nbytes`` long; TypeError for KV of a dtype without a safetensors name."""

    def __init__(self, key: KVKey, kv: ChunkKV) -> None:
        layout, named = Layout.of(kv), sorted(kv.sums.items())
        self._sums = [as_array(tensor) for _, tensor in named]
        specs = tuple(
            SealedSpec(
                name, TensorSpec(storable(tensor.dtype), tuple(tensor.shape)), google_crc32c.value(raw)
            )
            for (name, tensor), raw in zip(named, self._sums, strict=True)
        )
        header = EntryHeader(key, kv.start, layout, (0,) * layout.layers, specs, kv.quantised)
        self._header, self._layers = encode_header(header), RawLayers(kv, layout)
        self.nbytes = len(self._header) + header.nbytes

    def parts(self) -> list[bytes | memoryview]:
        """Header, then keys and values, then sums."""
        raws = [raw for piece in self._layers for raw in piece]
        set_crcs(self._header, self._layers.crcs)
        return [bytes(self._header), *(raw.data for raw in (*raws, *self._sums))]

    def write(self, fd: int, at: At = nowhere) -> None:
        """Write to an open, empty file; the header, with the CRCs of the layers, last."""
        end = len(self._header)
        for piece in self._layers:
            end = write_all(fd, [raw.data for raw in piece], end)
        at("half written")
        write_all(fd, [raw.data for raw in self._sums], end)
        set_crcs(self._header, self._layers.crcs)
        write_all(fd, [self._header])
        at("written")


def from_bytes(image: memoryview, key: KVKey) -> ChunkKV:
    """A copy of the KV in ``image``; EntryDamaged unless every byte is that of :class:`EntryImage`."""
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


def key_in(head: memoryview, size: int) -> KVKey:
    """The key in the first bytes of an entry of ``size`` bytes; EntryDamaged unless its header is whole."""
    return _header(head, size)[0].key


def _header(image: memoryview, size: int) -> tuple[EntryHeader, int]:
    end = header_size(bytes(image[:8]), size)
    return decode_header(bytes(image[:end])), end


def _check(raw: torch.Tensor, crc32c: int) -> None:
    if google_crc32c.value(raw.numpy()) != crc32c:
        raise EntryDamaged("tensors do not match their CRC")
