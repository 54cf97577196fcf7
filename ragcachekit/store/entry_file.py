"""One immutable safetensors file per entry: written once, verified at every read.

Plain reads into one buffer, not a memory map: a file cut short under a map is a SIGBUS, and a byte
that was verified in a map can still change afterwards.
"""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Iterator
from pathlib import Path

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
from ragcachekit.store.folder import write_all
from ragcachekit.types import KVKey

Bytes = npt.NDArray[np.uint8]


class EntryImage:
    """An entry as it will stand in its file: sealed header and the raw bytes of the tensors.

    Raises
    ------
    TypeError
        For KV of a dtype that safetensors does not know.
    """

    def __init__(self, key: KVKey, kv: ChunkKV) -> None:
        self._parts = [(_raw(k), _raw(v)) for k, v in zip(kv.keys, kv.values, strict=True)]
        layers = tuple(
            LayerSpec(TensorSpec.of(k), TensorSpec.of(v), _crc(*parts))
            for k, v, parts in zip(kv.keys, kv.values, self._parts, strict=True)
        )
        named = sorted(kv.sums.items())
        self._sums = [_raw(tensor) for _, tensor in named]
        sums = tuple(
            SealedSpec(name, TensorSpec.of(tensor), _crc(raw))
            for (name, tensor), raw in zip(named, self._sums, strict=True)
        )
        header = EntryHeader(key, kv.start, layers, sums)
        self._header = encode_header(header)
        self.nbytes = len(self._header) + header.nbytes
        """Size of the file in bytes."""

    def write(self, fd: int) -> None:
        """Write the whole image to an open file, and have it reach the medium."""
        write_all(fd, memoryview(self._header))
        for keys, values in self._parts:
            write_all(fd, keys.data)
            write_all(fd, values.data)
        for sums in self._sums:
            write_all(fd, sums.data)
        os.fsync(fd)


def read_entry(path: Path, key: KVKey) -> ChunkKV:
    """The KV in the file at ``path``, which must be that of ``key``.

    Raises
    ------
    EntryDamaged
        Unless every byte of the file is as it was written for exactly this key.
    OSError
        If the file cannot be read.
    """
    with _open(path) as file:
        header = _read_header(file)
        if header.key != key:
            raise EntryDamaged(f"{path.name} holds the entry of another key")
        tensors = list(_read_layers(file, header))
        sums = {sealed.name: _read_sealed(file, sealed) for sealed in header.sums}
    return ChunkKV(tuple(k for k, _ in tensors), tuple(v for _, v in tensors), header.start, sums)


def read_key(path: Path) -> KVKey:
    """Whose entry the file is, from its verified header; the tensors are not read.

    Raises
    ------
    EntryDamaged
        If the header is damaged, or the file's length or name does not belong to it.
    OSError
        If the file cannot be read.
    """
    with _open(path) as file:
        key = _read_header(file).key
    if key.digest() != path.stem:
        raise EntryDamaged(f"{path.name} holds the entry of another key")
    return key


def _open(path: Path) -> io.FileIO:
    return io.FileIO(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW))


def _read_header(file: io.FileIO) -> EntryHeader:
    status = os.fstat(file.fileno())
    if not stat.S_ISREG(status.st_mode):
        raise EntryDamaged("not a regular file")
    prefix = os.pread(file.fileno(), 8, 0)
    raw = np.empty(header_size(prefix, status.st_size), dtype=np.uint8)
    _fill(file, raw)
    header = decode_header(raw.tobytes())
    if len(raw) + header.nbytes != status.st_size:
        raise EntryDamaged(f"{status.st_size} bytes instead of {len(raw) + header.nbytes}")
    return header


def _read_layers(file: io.FileIO, header: EntryHeader) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    buffer = torch.empty(sum(layer.nbytes for layer in header.layers), dtype=torch.uint8)
    offset = 0
    for number, layer in enumerate(header.layers):
        raw = buffer[offset : offset + layer.nbytes]
        _fill(file, raw.numpy())
        if _crc(raw.numpy()) != layer.crc32c:
            raise EntryDamaged(f"layer {number} does not match its CRC")
        yield _tensor(raw[: layer.keys.nbytes], layer.keys), _tensor(raw[layer.keys.nbytes :], layer.values)
        offset += layer.nbytes


def _read_sealed(file: io.FileIO, sealed: SealedSpec) -> torch.Tensor:
    raw = torch.empty(sealed.nbytes, dtype=torch.uint8)
    _fill(file, raw.numpy())
    if _crc(raw.numpy()) != sealed.crc32c:
        raise EntryDamaged(f"{sealed.name} does not match its CRC")
    return _tensor(raw, sealed.tensor)


def _fill(file: io.FileIO, target: Bytes) -> None:
    view = target.data
    while view:
        got = file.readinto(view)
        if not got:
            raise EntryDamaged("the file ends early")
        view = view[got:]


def _tensor(raw: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    if raw.storage_offset() % spec.dtype.itemsize:
        raw = raw.clone()  # a wider type behind an odd number of narrower ones
    return raw.view(spec.dtype).reshape(spec.shape)


def _raw(tensor: torch.Tensor) -> Bytes:
    TensorSpec.of(tensor)  # refuses unknown types before any byte is touched
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    raw: Bytes = flat.view(torch.uint8).numpy()
    return raw


def _crc(*parts: Bytes) -> int:
    crc = 0
    for part in parts:
        crc = google_crc32c.extend(crc, part)
    return int(crc)
