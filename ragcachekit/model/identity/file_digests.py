"""Digests of files, cached in a JSON file until the files change."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ragcachekit.files import parse_json, read_regular, replace_file

_SETTLED_SECONDS = 2.0
_log = logging.getLogger(__name__)


def hash_file(path: Path) -> str:
    """SHA-256 of a file's bytes, streamed."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class FileDigests:
    """SHA-256 of files, cached in a JSON file by path, size, modification time and inode.

    A file changed within the last two seconds is not cached: the clock might not show a further change. A
    cache file (mode 0600) that is damaged or writable by others is ignored; one that cannot be written is
    logged. ``path`` None caches nothing.
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
        """Digest of a file; OSError if the file cannot be read, or changes meanwhile."""
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
        except (FileNotFoundError, NotADirectoryError):  # the latter is logged on writing
            return {}
        except (OSError, ValueError) as error:
            _log.warning("%s cannot be used (%s); weights are hashed again", self._path, error)
            return {}
        return content if isinstance(content, dict) else {}

    def _save(self, known: dict[str, Any]) -> None:
        if self._path is None:
            return
        try:
            replace_file(self._path, json.dumps(known))
        except OSError as error:
            _log.warning("digests cannot be remembered in %s (%s)", self._path, error)


def _identity(path: Path) -> dict[str, int]:
    status = path.stat()
    return {"size": status.st_size, "mtime_ns": status.st_mtime_ns, "inode": status.st_ino}
