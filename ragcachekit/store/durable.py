"""Getting bytes to the medium: written whole, on their way early, there when it matters."""

from __future__ import annotations

import ctypes
import errno
import os
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

from ragcachekit.files import OpenFile
from ragcachekit.store.entry_buffers import PAGE

_PARTS = 512  # in one call; Linux takes 1024
_WRITE = 2  # SYNC_FILE_RANGE_WRITE: begin, do not wait


def write_all(fd: int, parts: Sequence[bytes | bytearray | memoryview], offset: int = 0) -> int:
    """Write all of ``parts`` one behind the other, from ``offset``; returns where they end.

    The kernel may stop short, at 2 GiB or when space ends.
    """
    left = deque(view for view in (memoryview(part).cast("B") for part in parts) if view.nbytes)
    while left:
        written = os.pwritev(fd, list(islice(left, _PARTS)), offset)
        if written <= 0:
            raise OSError(errno.EIO, "nothing was written")
        offset += written
        while left and written >= left[0].nbytes:
            written -= left.popleft().nbytes
        if written:
            left[0] = left[0][written:]
    return offset


class EarlyFlush:
    """Lets the medium begin with what is written in order, while more of the file is being made.

    An fsync later waits for what is left only. Nothing is promised and nothing fails: where the system has
    no such call, all is left to the fsync.

    Parameters
    ----------
    fd : int
    start : int
        Where the writing begins. A page that also holds bytes before it is left alone: it is written to
        again, and would go to the medium twice.
    """

    def __init__(self, fd: int, start: int) -> None:
        self._fd = fd
        self._begun = -(-start // PAGE) * PAGE

    def upto(self, end: int) -> None:
        """All that stands before byte ``end`` is written; its last page only if that is full."""
        whole = end // PAGE * PAGE
        if _sync_file_range is not None and whole > self._begun:
            _sync_file_range(self._fd, self._begun, whole - self._begun, _WRITE)
            self._begun = whole


def sync_folder(path: Path) -> None:
    """Make renames and removals in ``path`` survive a power failure."""
    with OpenFile(path, os.O_RDONLY | os.O_DIRECTORY) as folder:
        os.fsync(folder.fd)


def _linux_call() -> Callable[[int, int, int, int], int] | None:
    """``sync_file_range``, which Python's ``os`` lacks. (Its POSIX_FADV_DONTNEED also begins to write, but
    then drops pages that will soon be read.)
    """
    try:
        call = ctypes.CDLL(None).sync_file_range
    except (AttributeError, OSError):
        return None
    call.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    call.restype = ctypes.c_int
    return call


_sync_file_range = _linux_call()
