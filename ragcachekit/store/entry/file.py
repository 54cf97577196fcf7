"""One immutable safetensors file per entry: written once, verified at every read.

Not memory-mapped: a mapped file that is cut short raises SIGBUS, and verified bytes can change afterwards.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence
from pathlib import Path

import google_crc32c
import torch

from ragcachekit.files import NO_FOLLOW, OpenFile, read_into
from ragcachekit.model.kv import ChunkKV
from ragcachekit.store.entry.buffers import Buffers
from ragcachekit.store.entry.header import EntryDamaged, EntryHeader, decode_header, header_size
from ragcachekit.store.entry.layout import as_tensor, split
from ragcachekit.types import KVKey

_PROBE = 8192  # bytes of the first read: most headers
_BATCH = 1 << 21  # bytes
_FRESH = Buffers(idle=0)


def entry_name(digest: str) -> str:
    """File name of the entry whose key has this digest."""
    return f"{digest}.safetensors"


class EntryReader:
    """An open entry file with verified ``header`` and ``sums``; layers are read and verified one by one.

    Used by one thread at a time. An evicted file can still be read to its end; ``status`` is that of the
    file. ``buffers`` provide memory for tensors. Raises EntryDamaged unless every byte of header and sums is
    as it was written, and OSError if the file cannot be read.
    """

    def __init__(self, path: Path | str, buffers: Buffers = _FRESH) -> None:
        self._buffers = buffers
        self._file = OpenFile(path, os.O_RDONLY | NO_FOLLOW)
        try:
            self.status = status = os.fstat(self._file.fd)
            if not stat.S_ISREG(status.st_mode):
                raise EntryDamaged("not a regular file")
            self.header, self._start = self._read_header(status.st_size)
            size = self._start + self.header.nbytes
            if size != status.st_size:
                raise EntryDamaged(f"{status.st_size} bytes instead of {size}")
            self.sums = self._read_sums() if self.header.sums else {}
        except BaseException as error:
            if isinstance(error, EntryDamaged):
                error.seen = self.status
            self.close()
            raise

    def layer(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer, in memory of their own; raises EntryDamaged or OSError."""
        (keys,), (values,) = self._layers(number, number + 1)
        return keys, values

    def kv(self) -> ChunkKV:
        """The whole entry; raises as :meth:`layer`."""
        layers, first = self.header.layout.layers, self.header.layout.offsets[1]
        # Small layers are read several at a time.
        step = max(1, _BATCH // first) if first else layers
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        for begin in range(0, layers, step):
            some = self._layers(begin, min(begin + step, layers))
            keys += some[0]
            values += some[1]
        header = self.header  # with a layout whose shapes agree
        return ChunkKV.checked(tuple(keys), tuple(values), header.start, self.sums, header.quantised)

    def _layers(self, begin: int, end: int) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        layout, crcs = self.header.layout, self.header.crcs
        first = layout.offsets[begin]
        raw = self._read(self._start + first, layout.offsets[end] - first)
        if google_crc32c.extend(crcs[begin - 1] if begin else 0, raw.numpy()) != crcs[end - 1]:
            last = f" to {end - 1}" if end - begin > 1 else ""
            raise EntryDamaged(f"layer {begin}{last} does not match its CRC")
        return split(raw, layout, begin, end)

    def close(self) -> None:
        """Close the file; may be repeated."""
        self._file.close()

    def __enter__(self) -> EntryReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read_header(self, file_size: int) -> tuple[EntryHeader, int]:
        first = self._read_bytes(min(_PROBE, file_size))
        size = header_size(first[:8], file_size)
        if size > len(first):
            first = self._read_bytes(size)
        return decode_header(first[:size]), size

    def _read_sums(self) -> dict[str, torch.Tensor]:
        sums, offset = {}, self._start + self.header.layout.nbytes
        for sealed in self.header.sums:
            raw = self._read(offset, sealed.nbytes)
            if google_crc32c.value(raw.numpy()) != sealed.crc32c:
                raise EntryDamaged(f"{sealed.name} does not match its CRC")
            sums[sealed.name] = as_tensor(raw, sealed.tensor)
            offset += sealed.nbytes
        return sums

    def _read(self, offset: int, nbytes: int) -> torch.Tensor:
        try:
            raw = self._buffers.take(nbytes)
        except RuntimeError as error:  # of torch
            raise OSError(errno.ENOMEM, f"no memory for {nbytes} bytes") from error
        self._fill(raw.numpy().data, offset)
        return raw

    def _read_bytes(self, nbytes: int) -> bytes:
        if hasattr(os, "pread"):  # not on Windows; spares clearing and copying the memory
            read = os.pread(self._file.fd, nbytes, 0)
            if len(read) == nbytes:
                return read
        raw = bytearray(nbytes)
        self._fill(memoryview(raw), 0)
        return bytes(raw)

    def _fill(self, view: memoryview, offset: int) -> None:
        done = 0
        while done < view.nbytes:
            got = read_into(self._file.fd, view[done:], offset + done)
            if not got:
                raise EntryDamaged("the file ends early")
            done += got


def open_entry(path: Path | str, key: KVKey, buffers: Buffers = _FRESH) -> EntryReader:
    """A reader of the file at ``path``, which must be that of ``key``; raises as :class:`EntryReader`."""
    reader = EntryReader(path, buffers)
    if reader.header.key != key:
        reader.close()
        error = EntryDamaged(f"{os.path.basename(path)} holds the entry of another key")
        error.seen = reader.status
        raise error
    return reader


def read_key(path: Path) -> KVKey:
    """The key in a file's verified header; the layers are not read.

    Raises EntryDamaged if header, length or name are wrong, and OSError if the file cannot be read.
    """
    with EntryReader(path) as reader:
        key = reader.header.key
    if key.digest() != path.stem:
        raise EntryDamaged(f"{path.name} holds the entry of another key")
    return key
