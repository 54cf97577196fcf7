"""The volume of a folder: a tier's default budget, and whether it takes writes."""

from __future__ import annotations

import errno
import shutil
from contextlib import suppress
from pathlib import Path

from ragcachekit.config import DEFAULT_DISK_BYTES

_NO_SPACE = {errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)}
_NO_WRITES = {*_NO_SPACE, errno.EROFS, errno.EIO}
_SHARE_OF_FREE, _SHARE_OF_VOLUME = 2, 16


def takes_no_writes(error: BaseException) -> bool:
    """Whether an error, or one of its causes, means that the medium is full, read-only or failing."""
    return _has_code(error, _NO_WRITES)


def is_full(error: BaseException) -> bool:
    """Whether an error, or one of its causes, means that there is no space left."""
    return _has_code(error, _NO_SPACE)


def _has_code(error: BaseException | None, codes: set[int]) -> bool:
    while error is not None:
        if isinstance(error, OSError) and error.errno in codes:
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
