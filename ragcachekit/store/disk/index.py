"""The disk tier's index: sizes, namespaces and order of use, in a SQLite file that may be lost at any time.

``entry_files`` rebuilds it from the entry files. It is therefore never flushed to the medium. Its journal is
a rollback journal, as WAL maps a file into memory and does not work on network file systems.

Not diskcache: each use would delete and insert a row, quotas have no query, and its default is pickle
(CVE-2025-69872).
"""

from __future__ import annotations

import os
import sqlite3
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from ragcachekit.files import NO_FOLLOW, make_folder, open_regular
from ragcachekit.store.disk.folder import FolderLock, IndexFailed

SECONDS_TO_LOCK = 5.0
"""Longest wait for others who change the folder."""

_NAME = "cache.db"
_SUFFIXES = ("", "-journal", "-wal", "-shm")
_SETTINGS = (
    "PRAGMA cell_size_check = ON",
    "PRAGMA mmap_size = 0",
    "PRAGMA journal_mode = PERSIST",
    "PRAGMA synchronous = OFF",
)
_SCHEMA = (
    # The order of use is the row id, which any index on a column has behind it.
    "CREATE TABLE entries (used INTEGER PRIMARY KEY, digest TEXT NOT NULL, namespace TEXT NOT NULL, "
    "nbytes INTEGER NOT NULL)",
    "CREATE UNIQUE INDEX by_digest ON entries (digest)",
    "CREATE INDEX by_namespace ON entries (namespace)",
    "CREATE TABLE totals (namespace TEXT PRIMARY KEY, entries INTEGER NOT NULL, nbytes INTEGER NOT NULL) "
    "WITHOUT ROWID",
    "CREATE TRIGGER added AFTER INSERT ON entries BEGIN "
    "INSERT INTO totals VALUES (NEW.namespace, 1, NEW.nbytes) "
    "ON CONFLICT DO UPDATE SET entries = entries + 1, nbytes = nbytes + excluded.nbytes; END",
    "CREATE TRIGGER removed AFTER DELETE ON entries BEGIN "
    "UPDATE totals SET entries = entries - 1, nbytes = nbytes - OLD.nbytes "
    "WHERE namespace = OLD.namespace; END",
)
_NEXT = "(SELECT IFNULL(MAX(used), 0) + 1 FROM entries)"

# Operational errors that a flipped bit causes as well; the others (full, busy) are the machine's.
_ALSO_DAMAGE = {sqlite3.SQLITE_ERROR, sqlite3.SQLITE_READONLY}

# The second where a damaged schema is no text: sqlite3 cannot decode the message about it.
_FAILURES = (sqlite3.Error, UnicodeDecodeError)


class IndexDamaged(IndexFailed):
    """The index is missing or damaged and has to be rebuilt."""


class EntryIndex:
    """Digest → namespace and file size, least recently used first.

    All but ``session``, ``discard`` and ``close`` belongs inside a session, which holds ``lock``: SQLite's
    own locks cannot guard :meth:`discard`.
    """

    def __init__(self, folder: Path, lock: FolderLock) -> None:
        self._path = folder / _NAME
        self._lock = lock
        self._connection: sqlite3.Connection | None = None
        self._file: tuple[int, int] | None = None
        self._closed = False

    @contextmanager
    def session(self, *, create: bool = False, seconds: float = SECONDS_TO_LOCK) -> Iterator[None]:
        """A transaction under the folder's lock; raises IndexDamaged or IndexFailed.

        It is committed even if the body raises: rows follow files, and files have no rollback. Sessions do
        not nest. ``create``: begin an index where there is none, which is damage otherwise.
        """
        with self._lock.held(seconds):
            try:
                self._begin(create)
                try:
                    yield
                finally:
                    self._finish()
            except _FAILURES as error:
                self._disconnect()
                raise _failure(error) from error

    def commit(self) -> None:
        """Commit the changes so far, and go on."""
        self._finish()
        self._execute("BEGIN IMMEDIATE")

    def discard(self) -> None:
        """Remove the files of a damaged index; the lock is held."""
        self._disconnect()
        for suffix in _SUFFIXES:
            self._path.with_name(_NAME + suffix).unlink(missing_ok=True)

    def close(self) -> None:
        """Close the connection; further sessions fail."""
        self._closed = True
        self._disconnect()

    def check(self) -> None:
        """Raise unless the file can be written, and tables and indexes agree."""
        self._execute("PRAGMA user_version = 0")
        for (found,) in self._execute("PRAGMA integrity_check(1)"):
            if found != "ok":
                raise sqlite3.DatabaseError(str(found))

    def sum_up(self) -> list[str]:
        """Compute the totals anew; returns the namespaces."""
        self._execute("DELETE FROM totals")
        self._execute("INSERT INTO totals SELECT namespace, COUNT(*), SUM(nbytes) FROM entries GROUP BY 1")
        return [name for (name,) in self._execute("SELECT namespace FROM totals")]

    def rows(self) -> dict[str, int]:
        """Digest → file size, least recently used first."""
        return dict(self._execute("SELECT digest, nbytes FROM entries ORDER BY used").fetchall())

    def nbytes(self, namespace: str | None = None) -> int:
        """Bytes of all entries, or of one namespace."""
        return self._number(
            "SELECT IFNULL(SUM(nbytes), 0) FROM totals WHERE ?1 IS NULL OR namespace = ?1", namespace
        )

    def __len__(self) -> int:
        return self._number("SELECT IFNULL(SUM(entries), 0) FROM totals")

    def size(self, digest: str) -> int:
        """File size of an entry; 0 if there is none."""
        return self._number("SELECT IFNULL(SUM(nbytes), 0) FROM entries WHERE digest = ?", digest)

    def oldest(self, but: str, namespace: str | None = None) -> str:
        """The least recently used entry (of a namespace) except ``but``."""
        whose, values = ("", (but,)) if namespace is None else ("AND namespace = ?", (but, namespace))
        row = self._execute(
            f"SELECT digest FROM entries WHERE digest != ? {whose} ORDER BY used LIMIT 1", values
        ).fetchone()
        if row is None or not isinstance(row[0], str):
            raise sqlite3.DatabaseError("an index whose sizes do not add up")
        return row[0]

    def add(self, digest: str, namespace: str, nbytes: int) -> None:
        """Add or replace an entry as the most recently used one."""
        self.remove(digest)
        self._execute(
            f"INSERT INTO entries (used, digest, namespace, nbytes) VALUES ({_NEXT}, ?, ?, ?)",
            (digest, namespace, nbytes),
        )

    def touch(self, digests: Sequence[str]) -> None:
        """Make entries, in this order, the most recently used ones; unknown digests are ignored."""
        (first,) = self._execute(f"SELECT {_NEXT}").fetchone()
        numbered = [(first + n, digest) for n, digest in enumerate(digests)]
        self._connected().executemany("UPDATE entries SET used = ? WHERE digest = ?", numbered)

    def remove(self, digest: str) -> None:
        """Remove an entry, if there is one."""
        self._execute("DELETE FROM entries WHERE digest = ?", (digest,))

    def _number(self, statement: str, *values: str | None) -> int:
        (number,) = self._execute(statement, values).fetchone()
        if not isinstance(number, int) or number < 0:
            raise sqlite3.DatabaseError("an index with a size that is no number")
        return number

    def _execute(self, statement: str, values: tuple[str | int | None, ...] = ()) -> sqlite3.Cursor:
        return self._connected().execute(statement, values)

    def _connected(self) -> sqlite3.Connection:
        if self._connection is None:
            raise sqlite3.DatabaseError("no session")
        return self._connection

    def _finish(self) -> None:
        if self._connected().in_transaction:  # not if it was interrupted in :meth:`commit`
            self._execute("COMMIT")

    def _begin(self, create: bool) -> None:
        if self._closed:
            raise IndexFailed("the index is closed")
        status = self._status(create)
        file = (status.st_dev, status.st_ino)
        if self._connection is None or self._connection.in_transaction or file != self._file:
            self._connect(file, create)  # the first time, interrupted, or another process replaced the file
        else:
            self._execute("BEGIN IMMEDIATE")

    def _connect(self, file: tuple[int, int], create: bool) -> None:
        self._disconnect()
        self._connection = sqlite3.connect(
            self._path, timeout=SECONDS_TO_LOCK, isolation_level=None, check_same_thread=False
        )
        for setting in _SETTINGS:
            self._execute(setting).fetchall()
        self._execute("BEGIN IMMEDIATE")
        found = [sql for (sql,) in self._execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")]
        if not found and create:
            for statement in _SCHEMA:
                self._execute(statement)
        elif found != list(_SCHEMA):
            raise sqlite3.DatabaseError("an index of another kind")
        self._file = file  # last: until then the next session connects anew

    def _status(self, create: bool) -> os.stat_result:
        with suppress(FileNotFoundError):
            status = os.lstat(self._path)
            if not stat.S_ISREG(status.st_mode):  # SQLite would wait for a FIFO
                raise IndexDamaged(f"{_NAME} is not a regular file")
            return status
        if not create:
            raise IndexDamaged("the index is gone")
        try:  # with mode 0600, which SQLite gives to its other files, too
            make_folder(self._path.parent)
            with open_regular(self._path, os.O_RDWR | NO_FOLLOW | os.O_CREAT) as file:
                return os.fstat(file.fd)
        except OSError as error:
            raise IndexFailed(f"the index cannot be created: {error}") from error

    def _disconnect(self) -> None:
        connection, self._connection, self._file = self._connection, None, None
        if connection is not None:
            with suppress(sqlite3.Error):
                connection.close()


def _failure(error: sqlite3.Error | UnicodeDecodeError) -> IndexFailed:
    machine = (
        isinstance(error, sqlite3.OperationalError) and error.sqlite_errorcode & 0xFF not in _ALSO_DAMAGE
    )
    kind = IndexFailed if machine else IndexDamaged
    return kind(f"the index failed: {error!r}")
