"""JSON values by JSON keys on disk, shared by the processes of one machine: ``diskcache`` without pickle."""

from __future__ import annotations

import json
import logging
import os
import sqlite3
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import diskcache
from diskcache.core import DBNAME, MODE_PICKLE, UNKNOWN

from ragcachekit.files import OpenFile, make_folder

log = logging.getLogger(__name__)

# diskcache keeps larger values in files, and removes a replaced file before its transaction is committed
_LARGEST_BLOB = 1 << 30

# diskcache trusts its table of settings: the last three are of values that are not there or of another type
_UNREADABLE = (sqlite3.DatabaseError, ValueError, TypeError, AttributeError, KeyError)
_DAMAGE = (*_UNREADABLE, OSError, diskcache.Timeout)


class JsonDisk(diskcache.Disk):  # type: ignore[misc]
    """Keys and values as JSON text, values behind their CRC-32; a pickled row raises ValueError.

    ``diskcache.JSONDisk`` would unpickle what somebody else wrote into its database.
    """

    def put(self, key: object) -> tuple[Any, bool]:
        return json.dumps(key), True

    def get(self, key: Any, raw: bool) -> Any:
        with suppress(ValueError):
            return json.loads(key) if raw and isinstance(key, str) else None
        return None

    def store(self, value: object, read: bool, key: Any = UNKNOWN) -> Any:
        text = json.dumps(value)
        return super().store(f"{_checksum(text)}{text}", False, key)

    def fetch(self, mode: int, filename: str | None, value: Any, read: bool) -> Any:
        if mode == MODE_PICKLE:
            raise ValueError("a pickled value")
        text = super().fetch(mode, filename, value, False)
        if not isinstance(text, str) or text[:8] != _checksum(text[8:]):
            raise ValueError("a damaged value")
        return json.loads(text[8:])


class JsonStore:
    """A persistent mapping of strings to JSON values. Thread and process safe.

    A value is stored with its key, and the checksum is over both. One that is cut short, altered or stands
    under another key is missing, and so is everything where the database cannot be read: that folder is put
    aside as ``NAME.damaged-TIME`` and an empty store takes its place.

    Parameters
    ----------
    folder : path
        Made for this user alone if it does not exist (mode 0700, files 0600). OSError where that is not
        allowed.
    size_limit : int, optional
        Bytes; the least recently stored values go first. None keeps everything.
    """

    def __init__(self, folder: str | os.PathLike[str], size_limit: int | None = None) -> None:
        self.folder = Path(folder).expanduser()
        make_folder(self.folder)
        self._options: dict[str, Any] = {"disk_min_file_size": _LARGEST_BLOB}
        if size_limit is None:
            self._options |= {"eviction_policy": "none", "cull_limit": 0}
        else:
            self._options |= {"eviction_policy": "least-recently-stored", "size_limit": size_limit}
        self._cache = self._open()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        try:
            return len(self._cache)
        except _DAMAGE:
            return 0

    def get(self, key: str) -> Any:
        """The value, or None if there is none or it is damaged."""
        try:
            stored = self._cache.get(key)
            if stored is not None and (not isinstance(stored, list) or stored[:1] != [key]):
                raise ValueError("a value of another key")  # SQLite follows damaged pages without noticing
            return None if stored is None else stored[1]
        except _DAMAGE as error:
            log.warning("%s: the value of %r cannot be read (%r)", self.folder, key, error)
            if isinstance(error, ValueError):  # other errors may pass
                with suppress(*_DAMAGE):
                    self._cache.delete(key)
            return None

    def put(self, values: Mapping[str, object], *, where: Mapping[str, object] | None = None) -> bool:
        """Store values together: all of them, or none where the process dies. OSError where it fails.

        None as a value removes its key. With ``where``, nothing is stored and False returned unless these
        keys have these values in the same transaction; None stands for a missing value.
        """
        try:
            with self._cache.transact():
                if any(self.get(key) != value for key, value in (where or {}).items()):
                    return False
                for key, value in values.items():
                    if value is None:
                        self._cache.delete(key)
                    else:
                        self._cache.set(key, [key, value])
                return True
        except (sqlite3.DatabaseError, diskcache.Timeout) as error:
            raise OSError(f"cannot write to {self.folder}: {error}") from error

    def delete(self, keys: Iterable[str]) -> None:
        """Remove values; keys that are not there do not count. OSError where it fails."""
        try:
            with self._cache.transact():
                for key in keys:
                    self._cache.delete(key)
        except (sqlite3.DatabaseError, diskcache.Timeout) as error:
            raise OSError(f"cannot write to {self.folder}: {error}") from error

    def keys(self, prefix: str = "") -> list[str]:
        """Keys in the order in which they first came; none where they cannot be read."""
        try:
            return [key for key in self._cache if isinstance(key, str) and key.startswith(prefix)]
        except _DAMAGE as error:
            log.warning("%s: its keys cannot be read (%r)", self.folder, error)
            return []

    def items(self) -> Iterator[tuple[str, Any]]:
        """Keys and values in the order of :meth:`keys`; damaged values are left out."""
        values = ((key, self.get(key)) for key in self.keys())
        yield from ((key, value) for key, value in values if value is not None)

    def clear(self) -> None:
        """Remove everything; OSError where it fails."""
        try:
            self._cache.clear()
        except (sqlite3.DatabaseError, diskcache.Timeout) as error:
            raise OSError(f"cannot write to {self.folder}: {error}") from error

    def close(self) -> None:
        """Close the database; a later call opens it again."""
        self._cache.close()

    def _open(self) -> Any:
        try:
            return self._connect()
        except _UNREADABLE as error:
            aside = self.folder.with_name(f"{self.folder.name}.damaged-{time.time_ns()}")
            log.warning("%s is damaged (%r); put aside as %s", self.folder, error, aside)
            self.folder.rename(aside)
            make_folder(self.folder)
        try:
            return self._connect()
        except _UNREADABLE as error:
            raise OSError(f"cannot open {self.folder}: {error}") from error

    def _connect(self) -> Any:
        # SQLite's own would have the umask's mode. Never opened where it exists: closing it would drop the
        # locks of this process's other connections, and SQLite would lose what other processes wrote.
        with suppress(FileExistsError):
            OpenFile(self.folder / DBNAME, os.O_RDWR | os.O_CREAT | os.O_EXCL).close()
        cache = diskcache.Cache(str(self.folder), disk=JsonDisk, **self._options)
        len(cache)
        return cache


def _checksum(text: str) -> str:
    return f"{zlib.crc32(text.encode('utf-8', 'surrogatepass')):08x}"
