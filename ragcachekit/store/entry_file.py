"""One immutable safetensors file per entry: written once, verified at every read.

Plain reads into memory of our own, never a memory map. There is no safe use of one here: a file cut
short under a map is a SIGBUS for whoever touches it, a private (copy-on-write) map not excepted, since
pages that were not written to still belong to the file; and a byte that was verified in a map can change
afterwards. Reading costs one copy, which checking the CRC then finds in the processor's cache.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path

import google_crc32c
import torch

from ragcachekit.model.kv import ChunkKV
from ragcachekit.store.entry_buffers import PAGE, SMALL, Buffers
from ragcachekit.store.entry_bytes import to_bytes
from ragcachekit.store.entry_header import (
    EntryDamaged,
    EntryHeader,
    decode_header,
    header_size,
)
from ragcachekit.store.entry_tensors import as_tensor, split
from ragcachekit.store.folder import temp_file, write_all
from ragcachekit.types import KVKey

At = Callable[[str], None]
"""Hears the name of each step worth being interrupted at."""

_PROBE = 16384  # bytes of the first read: most headers
_BATCH = 1 << 21  # bytes
_FRESH = Buffers(idle=0)
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW


def nowhere(step: str) -> None:
    """The :data:`At` that does nothing."""


class EntryImage:
    """An entry as it will stand in its file: sealed header and the raw bytes of the tensors.

    Raises
    ------
    TypeError
        For KV of a dtype that safetensors does not know.
    """

    def __init__(self, key: KVKey, kv: ChunkKV) -> None:
        self._parts = to_bytes(key, kv)
        self.nbytes = sum(len(part) for part in self._parts)
        """Size of the file in bytes."""

    def write(self, fd: int, at: At = nowhere) -> None:
        """Write the whole image to an open file; it may not have reached the medium yet."""
        half = len(self._parts) // 2
        write_all(fd, self._parts[:half])
        at("half written")
        write_all(fd, self._parts[half:])
        at("written")


class EntryReader:
    """An open entry file whose header and sums are verified; layers are read and verified one by one.

    Used by one thread at a time; any number of readers may have the same file open. Whoever made it
    closes it. A file that is evicted meanwhile can still be read to its end.

    Parameters
    ----------
    path : Path or str
    direct : bool
        Read past the page cache (O_DIRECT), see :func:`can_read_directly`.
    buffers : Buffers, optional
        Where memory for the tensors comes from.

    Attributes
    ----------
    header : EntryHeader
    sums : dict of str to torch.Tensor
    status : os.stat_result
        Of the file when it was opened.

    Raises
    ------
    EntryDamaged
        Unless every byte of the header and of the sums is as it was written.
    OSError
        If the file cannot be read.
    """

    _fd = -1

    def __init__(self, path: Path | str, direct: bool = False, buffers: Buffers = _FRESH) -> None:
        self._buffers = buffers
        self._direct = direct
        self._fd = os.open(path, _FLAGS | (os.O_DIRECT if direct else 0))
        try:
            self.status = os.fstat(self._fd)
            self.header, start = self._read_header()
            sizes = [spec.nbytes for spec in self.header.layers]
            sizes += [spec.nbytes for spec in self.header.sums]
            self._offsets = list(accumulate(sizes, initial=start))
            if self._offsets[-1] != self.status.st_size:
                raise EntryDamaged(f"{self.status.st_size} bytes instead of {self._offsets[-1]}")
            self.sums = {sealed.name: self._sealed(n) for n, sealed in enumerate(self.header.sums)}
        except BaseException as error:
            if isinstance(error, EntryDamaged):
                error.seen = self.status
            self.close()
            raise

    def layer(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer, in memory of their own.

        Raises
        ------
        EntryDamaged
            Unless every byte is as it was written.
        OSError
            If the file cannot be read.
        """
        (pair,) = self._layers(number, number + 1)
        return pair

    def kv(self) -> ChunkKV:
        """All of it; raises as :meth:`layer`."""
        layers = len(self.header.layers)
        # Several small layers at a time: a read and a buffer have costs of their own.
        step = max(1, _BATCH // self.header.layers[0].nbytes) if self.header.layers[0].nbytes else layers
        pairs = [pair for n in range(0, layers, step) for pair in self._layers(n, min(n + step, layers))]
        keys, values = zip(*pairs, strict=True)
        return ChunkKV(keys, values, self.header.start, self.sums, self.header.quantised)

    def _layers(self, begin: int, end: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        specs, start = self.header.layers[begin:end], self._offsets[begin]
        raw = self._read(start, self._offsets[end] - start)
        array, at = raw.numpy(), 0
        for number, spec in enumerate(specs, begin):
            if google_crc32c.value(array[at : at + spec.nbytes]) != spec.crc32c:
                raise EntryDamaged(f"layer {number} does not match its CRC")
            at += spec.nbytes
        return zip(*split(raw, specs), strict=True)

    def close(self) -> None:
        """Close the file; also twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> EntryReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def _read_header(self) -> tuple[EntryHeader, int]:
        if not stat.S_ISREG(self.status.st_mode):
            raise EntryDamaged("not a regular file")
        probe = min(_PROBE, self.status.st_size)
        first = b"" if self._direct else os.pread(self._fd, probe, 0)
        if len(first) < probe:
            first = self._read(0, probe).numpy().tobytes()
        size = header_size(first[:8], self.status.st_size)
        if size > len(first):
            first = self._read(0, size).numpy().tobytes()
        return decode_header(first[:size]), size

    def _sealed(self, number: int) -> torch.Tensor:
        sealed = self.header.sums[number]
        raw = self._read(self._offsets[len(self.header.layers) + number], sealed.nbytes)
        if _crc(raw) != sealed.crc32c:
            raise EntryDamaged(f"{sealed.name} does not match its CRC")
        return as_tensor(raw, sealed.tensor)

    def _read(self, offset: int, nbytes: int) -> torch.Tensor:
        if self._direct:
            return self._read_pages(offset, nbytes)
        raw = self._buffers.take(nbytes)
        self._fill(raw, offset, nbytes)
        return raw

    def _read_pages(self, offset: int, nbytes: int) -> torch.Tensor:
        """As ``_read``, of whole pages into whole pages, which is what O_DIRECT wants."""
        before = offset % PAGE
        whole = -(-(before + nbytes) // PAGE) * PAGE
        memory = self._buffers.take(whole + PAGE)
        memory = memory[-memory.data_ptr() % PAGE :][:whole]
        self._fill(memory, offset - before, before + nbytes)
        part = memory[before : before + nbytes]
        return part.clone() if nbytes < SMALL else part  # whose pages would be many times the entry

    def _fill(self, memory: torch.Tensor, offset: int, needed: int) -> None:
        """Read into ``memory`` until its first ``needed`` bytes are there."""
        view: memoryview = memory.numpy().data
        done = 0
        while done < needed:
            got = self._pread(view[done:], offset + done)
            if not got:
                raise EntryDamaged("the file ends early")
            done += got

    def _pread(self, view: memoryview, offset: int) -> int:
        try:
            return os.preadv(self._fd, [view], offset)
        except OSError as error:
            if not self._direct or error.errno != errno.EINVAL:
                raise
        # Stopped short of a page's end, so that the rest is not aligned: an ordinary read can go on there.
        fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) & ~os.O_DIRECT)
        self._direct = False
        return os.preadv(self._fd, [view], offset)


def can_read_directly(folder: Path) -> bool:
    """Whether files in ``folder`` can be read past the page cache, found out by doing it."""
    if not hasattr(os, "O_DIRECT"):
        return False
    memory = torch.empty(2 * PAGE, dtype=torch.uint8)
    view: memoryview = memory[-memory.data_ptr() % PAGE :][:PAGE].numpy().data
    try:
        with temp_file(folder) as (fd, path):
            write_all(fd, [bytes(PAGE)])
            os.fsync(fd)
            direct = os.open(path, _FLAGS | os.O_DIRECT)
            try:
                return os.preadv(direct, [view], 0) == PAGE
            finally:
                os.close(direct)
    except OSError:
        return False


def open_entry(path: Path | str, key: KVKey, direct: bool = False, buffers: Buffers = _FRESH) -> EntryReader:
    """A reader of the file at ``path``, which must be that of ``key``; raises as :class:`EntryReader`."""
    reader = EntryReader(path, direct, buffers)
    if reader.header.key != key:
        reader.close()
        error = EntryDamaged(f"{os.path.basename(path)} holds the entry of another key")
        error.seen = reader.status
        raise error
    return reader


def read_entry(path: Path, key: KVKey) -> ChunkKV:
    """The KV in the file at ``path``, which must be that of ``key``; raises as :class:`EntryReader`."""
    with open_entry(path, key) as reader:
        return reader.kv()


def read_key(path: Path) -> KVKey:
    """Whose entry the file is, from its verified header; the layers are not read.

    Raises
    ------
    EntryDamaged
        If the header is damaged, or the file's length or name does not belong to it.
    OSError
        If the file cannot be read.
    """
    with EntryReader(path) as reader:
        key = reader.header.key
    if key.digest() != path.stem:
        raise EntryDamaged(f"{path.name} holds the entry of another key")
    return key


def _crc(raw: torch.Tensor) -> int:
    return int(google_crc32c.value(raw.numpy()))
