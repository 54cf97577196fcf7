"""The volume of a folder: a tier's default budget, and whether it takes writes."""

from __future__ import annotations

import errno
import shutil
import sqlite3
from contextlib import suppress
from pathlib import Path

from ragcachekit.config import DEFAULT_DISK_BYTES

_NO_SPACE = {errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)}
_NO_WRITES = {*_NO_SPACE, errno.EROFS, errno.EIO}
_SQLITE_NO_WRITES = {
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_CANTOPEN,  # also of a journal for which there is no room
    sqlite3.SQLITE_READONLY,
}
_SHARE_OF_FREE, _SHARE_OF_VOLUME = 2, 16


def takes_no_writes(error: BaseException | None) -> bool:
    """Whether an error, or one of its causes, means that the medium is full, read-only or failing."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _NO_WRITES:
            return True
        if isinstance(error, sqlite3.Error):
            code = getattr(error, "sqlite_errorcode", None)
            if code is not None and code & 0xFF in _SQLITE_NO_WRITES:
                return True
        error = error.__cause__
    return False


def is_full(error: BaseException | None) -> bool:
    """Whether an error, or one of its causes, means that there is no space left."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _NO_SPACE:
            return True
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
            return True
        error = error.__cause__
    return False


def default_disk_bytes(folder: Path) -> int:
    """The default budget of a disk tier.

    64 GiB, or half of what is free or already the folder's where that is less; but at least a sixteenth of
    the volume, and at least the folder's present content.
    """
    existing = next((path for path in (folder, *folder.parents) if path.exists()), folder)
    taken = 0
    try:
        volume = shutil.disk_usage(existing)
        for file in folder.glob("*.safetensors"):
            with suppress(FileNotFoundError):  # another process evicted it just now
                taken += file.stat().st_size
    except OSError:
        return DEFAULT_DISK_BYTES
    free, least = volume.free + taken, volume.total // _SHARE_OF_VOLUME
    return max(1, min(DEFAULT_DISK_BYTES, max(free // _SHARE_OF_FREE, least, taken)))
