"""The volume below a folder: how much of it a tier may take by default, and whether it takes writes."""

from __future__ import annotations

import errno
import shutil
import sqlite3
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
    """Whether an error, or one that caused it, says that the medium is full, read-only or failing.

    Everything else (a file in the folder's place, somebody else's folder) is a mistake that only the user
    can mend.
    """
    while error is not None:
        if isinstance(error, OSError) and error.errno in _NO_WRITES:
            return True
        if _sqlite_code(error) in _SQLITE_NO_WRITES:
            return True
        error = error.__cause__
    return False


def is_full(error: BaseException | None) -> bool:
    """Whether an error, or one that caused it, says that there is no space left."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _NO_SPACE:
            return True
        if _sqlite_code(error) == sqlite3.SQLITE_FULL:
            return True
        error = error.__cause__
    return False


def default_disk_bytes(folder: Path) -> int:
    """The budget of a disk tier for which none was given.

    64 GiB, or half of what is free and what the folder takes already where that is less; but not less than
    a sixteenth of the volume, which on a full one is there again when others leave it, and not less than
    what the folder has.
    """
    existing = next((path for path in (folder, *folder.parents) if path.exists()), folder)
    try:
        volume = shutil.disk_usage(existing)
        taken = sum(map(_size, folder.glob("*.safetensors")))
    except OSError:  # the volume cannot say
        return DEFAULT_DISK_BYTES
    free, least = volume.free + taken, volume.total // _SHARE_OF_VOLUME
    return max(1, min(DEFAULT_DISK_BYTES, max(free // _SHARE_OF_FREE, least, taken)))


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:  # another process evicted it just now
        return 0


def _sqlite_code(error: BaseException) -> int | None:
    code = getattr(error, "sqlite_errorcode", None) if isinstance(error, sqlite3.Error) else None
    return None if code is None else code & 0xFF
