"""Digests of files, remembered for as long as the files do not change."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ragcachekit.files import make_folder, parse_json, read_regular

_SETTLED_SECONDS = 2.0
_log = logging.getLogger(__name__)


def hash_file(path: Path) -> str:
    """SHA-256 of a file's bytes, streamed."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class FileDigests:
    """File digests remembered by path, size, modification time and inode, in a small JSON file.

    A file changed within the last two seconds is hashed but not remembered: it could change once more
    within the clock's resolution. A damaged memory, or one that others may write to, is ignored; one
    that cannot be written is logged, and the digests are computed again next time.

    Parameters
    ----------
    path : Path or None
        The JSON file (mode 0600, replaced atomically); None remembers nothing.
    hasher : callable
        Path to digest.
    clock : callable
        Seconds since the epoch.
    """

    def __init__(
        self,
        path: Path | None,
        hasher: Callable[[Path], str] = hash_file,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._path = path
        self._hasher = hasher
        self._clock = clock

    def get(self, file: Path) -> str:
        """The file's digest, from memory if the file is unchanged.

        Raises
        ------
        OSError
            If the file cannot be read, or changes while it is.
        """
        real = Path(os.path.realpath(file))
        before = _identity(real)
        known = self._load()
        entry = known.get(str(real))
        if isinstance(entry, dict) and entry.get("file") == before and isinstance(entry.get("sha256"), str):
            return str(entry["sha256"])
        digest = self._hasher(real)
        if _identity(real) != before:
            raise OSError(f"{file} changed while it was read")
        if self._clock() - before["mtime_ns"] / 1e9 > _SETTLED_SECONDS:
            self._save({**known, str(real): {"file": before, "sha256": digest}})
        return digest

    def _load(self) -> dict[str, Any]:
        if self._path is None:
            return {}
        try:
            content = parse_json(read_regular(self._path, own=True))
        except (FileNotFoundError, NotADirectoryError):  # the latter is told of where it is to be written
            return {}
        except (OSError, ValueError) as error:
            _log.warning("%s cannot be used (%s); weights are hashed again", self._path, error)
            return {}
        return content if isinstance(content, dict) else {}

    def _save(self, known: dict[str, Any]) -> None:
        if self._path is None:
            return
        temp = self._path.with_name(f".{self._path.name}.{os.getpid()}.{uuid.uuid4().hex}")
        try:
            make_folder(self._path.parent)
            descriptor = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w") as file:
                json.dump(known, file)
                file.flush()
                os.fsync(file.fileno())
            temp.replace(self._path)
        except OSError as error:
            with suppress(OSError):
                temp.unlink(missing_ok=True)
            _log.warning("digests cannot be remembered in %s (%s)", self._path, error)


def _identity(path: Path) -> dict[str, int]:
    status = path.stat()
    return {"size": status.st_size, "mtime_ns": status.st_mtime_ns, "inode": status.st_ino}
