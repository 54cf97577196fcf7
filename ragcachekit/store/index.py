"""The disk tier's index: which entries there are, how large, in which order they were last used.

diskcache (SQLite) holds it, so that several processes can share one. It can be lost at any time: the
files are the truth, and :class:`~ragcachekit.store.disk.DiskStore` rebuilds it from them.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import diskcache

from ragcachekit.errors import StoreError
from ragcachekit.store.folder import open_folder

_RAW_MODE = diskcache.core.MODE_RAW
_SECONDS_TO_LOCK = 5.0
# Eviction is ours: left to itself, diskcache deletes rows when it thinks that it is too large. No
# memory map either: a database cut short under one is a SIGBUS.
_SETTINGS: dict[str, Any] = {
    "eviction_policy": "none",
    "cull_limit": 0,
    "statistics": 0,
    "tag_index": 0,
    "sqlite_mmap_size": 0,
}


class IndexFailed(StoreError):
    """The index is damaged, locked for too long, or cannot be written."""


class JsonDisk(diskcache.Disk):  # type: ignore[misc]
    """Keys as text, values as JSON inside the row; never pickle (CVE-2025-69872), never a value file.

    ``size``, for diskcache the length of a value file of its own, is that of our entry file: its
    triggers then keep the sum of all sizes inside the same transaction as the rows.
    """

    def put(self, key: object) -> tuple[str, bool]:
        """Only text is a key."""
        if not isinstance(key, str):
            raise TypeError(f"index keys are str, not {type(key).__name__}")
        return key, True

    def get(self, key: object, raw: object) -> str:
        """The reverse of ``put``."""
        if not raw or not isinstance(key, str):
            raise sqlite3.DatabaseError("an index key that is not text")
        return key

    def store(self, value: dict[str, int], read: bool, key: object = None) -> tuple[int, int, None, str]:
        """A row: size, mode, no file name, JSON."""
        return value["nbytes"], _RAW_MODE, None, json.dumps(value)

    def fetch(self, mode: object, filename: object, value: object, read: bool) -> dict[str, int]:
        """The reverse of ``store``; any other mode (pickle is one) is damage."""
        if mode != _RAW_MODE or filename is not None or not isinstance(value, str):
            raise sqlite3.DatabaseError("an index row of a foreign kind")
        try:
            row = json.loads(value)
        except ValueError as error:
            raise sqlite3.DatabaseError("an index row that is not JSON") from error
        if not isinstance(row, dict) or not isinstance(row.get("nbytes"), int):
            raise sqlite3.DatabaseError("an index row without a size")
        return row

    def remove(self, file_path: object) -> None:
        """Rows have no files; whatever name a damaged row holds is left alone."""


class EntryIndex:
    """Digest → file size, oldest use first. All methods but ``close`` belong inside :meth:`session`.

    Raises
    ------
    IndexFailed
        If there is no usable index in ``folder``.
    """

    def __init__(self, folder: Path) -> None:
        open_folder(folder)
        database = folder / diskcache.core.DBNAME
        # SQLite gives its files the mode of the database, so that exists, with 0600, before it.
        os.close(os.open(database, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
        try:
            self._cache = diskcache.Cache(str(folder), timeout=_SECONDS_TO_LOCK, disk=JsonDisk, **_SETTINGS)
        except Exception as error:  # damaged settings surface as anything, from KeyError to AttributeError
            raise IndexFailed(f"the index in {folder} cannot be opened: {error!r}") from error

    @contextmanager
    def session(self) -> Iterator[None]:
        """A transaction that no other thread or process can come between.

        Raises
        ------
        IndexFailed
            For whatever SQLite or a damaged row brings up; nothing is changed then.
        """
        try:
            with self._cache.transact():
                yield
        except (sqlite3.Error, diskcache.Timeout) as error:
            self._cache.close()  # a commit that failed leaves its transaction open; the next use reconnects
            raise IndexFailed(f"the index failed: {error!r}") from error

    @property
    def nbytes(self) -> int:
        """Sum of all sizes."""
        return self._sum("size")

    def __len__(self) -> int:
        return self._sum("count")

    def digests(self) -> list[str]:
        """All digests, least recently used first."""
        return list(self._cache)

    def size(self, digest: str) -> int | None:
        """File size of an entry, or None."""
        row = self._cache.get(digest)
        return None if row is None else int(row["nbytes"])

    def oldest(self) -> str:
        """The least recently used entry; asking an empty index means that its sums are wrong."""
        try:
            digest, _ = self._cache.peekitem(last=False)
        except KeyError as error:
            raise sqlite3.DatabaseError("an empty index whose sizes do not add up to nothing") from error
        return str(digest)

    def add(self, digest: str, nbytes: int) -> None:
        """Add or replace an entry as the most recently used one."""
        # Not an update: rows are ordered by insertion, which makes that the order of use.
        self.remove(digest)
        self._cache.set(digest, {"nbytes": nbytes})

    def touch(self, digest: str) -> None:
        """Make an entry the most recently used one; one that has gone meanwhile stays gone."""
        nbytes = self.size(digest)
        if nbytes is not None:
            self.add(digest, nbytes)

    def remove(self, digest: str) -> None:
        """Forget an entry; no error if there is none."""
        self._cache.delete(digest)

    def close(self) -> None:
        """Close this thread's connection."""
        self._cache.close()

    def _sum(self, setting: str) -> int:
        """A sum that diskcache's triggers keep, read afresh: another process may have changed it."""
        try:
            return int(self._cache.reset(setting))
        except (ValueError, TypeError) as error:
            raise sqlite3.DatabaseError(f"an index without a valid {setting}") from error


def discard_index(folder: Path) -> None:
    """Remove the files of a damaged index; processes that still use it keep their unlinked copy."""
    for suffix in ("", "-wal", "-shm", "-journal"):
        (folder / (diskcache.core.DBNAME + suffix)).unlink(missing_ok=True)
