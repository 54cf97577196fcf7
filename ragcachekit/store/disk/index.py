"""The disk tier's index: which entries there are, whose, how large, in which order they were last used.

It is a SQLite file that can be lost at any time: the entry files are the truth, and
``entry_files`` rebuilds it from them. Its journal is therefore never flushed to
the medium, and is a plain rollback journal: WAL maps a file into memory (cut short, that is a SIGBUS) and
does not work on network file systems.

Not diskcache: its rows would be values in an order of insertion, so that each use deletes and inserts
one, quotas have no query, and its default is pickle (CVE-2025-69872).
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
"""How long work that changes the folder waits for others who do."""

_NAME = "cache.db"
_SUFFIXES = ("", "-journal", "-wal", "-shm")
_SETTINGS = (
    "PRAGMA cell_size_check = ON",
    "PRAGMA mmap_size = 0",
    "PRAGMA journal_mode = PERSIST",
    "PRAGMA synchronous = OFF",
)
_SCHEMA = (
    # The order of use is the row id: the oldest row is the first, and any index on a column has it behind.
    "CREATE TABLE entries (used INTEGER PRIMARY KEY, digest TEXT NOT NULL, namespace TEXT NOT NULL, "
    "nbytes INTEGER NOT NULL)",
    "CREATE UNIQUE INDEX by_digest ON entries (digest)",
    "CREATE INDEX by_namespace ON entries (namespace)",
    "CREATE TABLE totals (namespace TEXT PRIMARY KEY, entries INTEGER NOT NULL, nbytes INTEGER NOT NULL) "
    "WITHOUT ROWID",
)
_NEXT = "(SELECT IFNULL(MAX(used), 0) + 1 FROM entries)"

# Operational errors that a flipped bit brings up as well; the others (full, busy) are the machine's.
_ALSO_DAMAGE = {sqlite3.SQLITE_ERROR, sqlite3.SQLITE_READONLY}

# The second, if a damaged schema is no text: sqlite3 cannot even decode the message that says so.
_FAILURES = (sqlite3.Error, UnicodeDecodeError)


class IndexDamaged(IndexFailed):
    """The index is gone, or is not what was written to it: it has to be rebuilt."""


class EntryIndex:
    """Digest → namespace and file size, oldest use first.

    All but ``session``, ``discard`` and ``close`` belongs inside a session, which holds ``lock``: SQLite has
    locks of its own, but they cannot guard :meth:`discard`.
    """

    def __init__(self, folder: Path, lock: FolderLock) -> None:
        self._path = folder / _NAME
        self._lock = lock
        self._connection: sqlite3.Connection | None = None
        self._of: tuple[int, int, int] | None = None  # process and file that it belongs to
        self._inherited: list[sqlite3.Connection] = []
        self._closed = False

    @contextmanager
    def session(self, *, create: bool = False, seconds: float = SECONDS_TO_LOCK) -> Iterator[None]:
        """A transaction that no other thread or process can come between.

        It is committed even if the body raises: rows follow what happened to files, and files have no
        rollback. Sessions do not nest. ``create``: begin an index where there is none, which is damage
        otherwise. IndexDamaged or IndexFailed for whatever goes wrong; nothing is changed then.
        """
        with self._lock.held(seconds):
            try:
                self._begin(create)
                try:
                    yield
                except _FAILURES:
                    raise
                except BaseException:
                    self._finish()
                    raise
                self._finish()
            except _FAILURES as error:
                self._disconnect()  # takes back what was not committed
                raise _failure(error) from error

    def commit(self) -> None:
        """Commit what was changed so far, and go on."""
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
        """Raise unless it can be written, and tables and indexes agree."""
        self._execute("PRAGMA user_version = 0")
        for (found,) in self._execute("PRAGMA integrity_check(1)"):
            if found != "ok":
                raise sqlite3.DatabaseError(str(found))

    def sum_up(self) -> list[str]:
        """Make the sums from the rows; returns the namespaces."""
        self._execute("DELETE FROM totals")
        self._execute("INSERT INTO totals SELECT namespace, COUNT(*), SUM(nbytes) FROM entries GROUP BY 1")
        return [name for (name,) in self._execute("SELECT namespace FROM totals")]

    def rows(self) -> dict[str, int]:
        """Digest → file size, least recently used first."""
        return dict(self._execute("SELECT digest, nbytes FROM entries ORDER BY used").fetchall())

    def owners(self) -> dict[str, str]:
        """Digest → namespace."""
        return dict(self._execute("SELECT digest, namespace FROM entries").fetchall())

    def nbytes(self, namespace: str | None = None) -> int:
        """Sum of all sizes, or of those of one namespace."""
        return self._number(
            "SELECT IFNULL(SUM(nbytes), 0) FROM totals WHERE ?1 IS NULL OR namespace = ?1", namespace
        )

    def __len__(self) -> int:
        return self._number("SELECT IFNULL(SUM(entries), 0) FROM totals")

    def size(self, digest: str) -> int:
        """File size of an entry; 0 if there is none."""
        return self._number("SELECT IFNULL(SUM(nbytes), 0) FROM entries WHERE digest = ?", digest)

    def oldest(self, but: str, namespace: str | None = None) -> str:
        """The least recently used entry (of a namespace) but one; there is one unless the sums are wrong."""
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
        self._execute(
            "INSERT INTO totals VALUES (?, 1, ?) "
            "ON CONFLICT DO UPDATE SET entries = entries + 1, nbytes = nbytes + excluded.nbytes",
            (namespace, nbytes),
        )

    def touch(self, digests: Sequence[str]) -> None:
        """Make entries, in this order, the most recently used ones; those without a row are left out."""
        (first,) = self._execute(f"SELECT {_NEXT}").fetchone()
        numbered = [(first + n, digest) for n, digest in enumerate(digests)]
        self._connected().executemany("UPDATE entries SET used = ? WHERE digest = ?", numbered)

    def remove(self, digest: str) -> None:
        """Forget an entry; no error if there is none."""
        row = self._execute(
            "SELECT used, namespace, nbytes FROM entries WHERE digest = ?", (digest,)
        ).fetchone()
        if row is None:
            return
        used, namespace, nbytes = row
        if self._execute("DELETE FROM entries WHERE used = ? AND digest = ?", (used, digest)).rowcount != 1:
            raise sqlite3.DatabaseError("an index whose parts disagree")
        self._execute(
            "UPDATE totals SET entries = entries - 1, nbytes = nbytes - ? WHERE namespace = ?",
            (nbytes, namespace),
        )

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
        of = (os.getpid(), status.st_dev, status.st_ino)
        if self._connection is None or self._connection.in_transaction or of != self._of:
            self._connect(of, create)  # the first time, interrupted, forked, or another file
        else:
            self._execute("BEGIN IMMEDIATE")

    def _connect(self, of: tuple[int, int, int], create: bool) -> None:
        self._disconnect()
        for suffix in _SUFFIXES:  # SQLite would wait for a FIFO
            if _is_odd(self._path.with_name(_NAME + suffix)):
                raise IndexDamaged(f"{_NAME + suffix} is not a regular file")
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
        self._of = of  # last: until then the next session begins anew

    def _status(self, create: bool) -> os.stat_result:
        # SQLite gives its files the mode of the database, so that exists, with 0600, before it.
        with suppress(FileNotFoundError):
            return os.lstat(self._path)
        if not create:
            raise IndexDamaged("the index is gone")
        try:
            make_folder(self._path.parent)
            with open_regular(self._path, os.O_RDWR | NO_FOLLOW | os.O_CREAT) as file:
                return os.fstat(file.fd)
        except OSError as error:
            raise IndexFailed(f"the index cannot be created: {error}") from error

    def _disconnect(self) -> None:
        connection, self._connection, of, self._of = self._connection, None, self._of, None
        if connection is not None and of is not None and of[0] != os.getpid():
            self._inherited.append(connection)  # closing it would end the parent's locks: it is left alone
        elif connection is not None:
            with suppress(sqlite3.Error):
                connection.close()


def is_index(path: Path) -> bool:
    """Whether a file is an index of ours, by the schema in its first page."""
    try:
        with open_regular(path) as file:
            return _SCHEMA[1].encode() in os.read(file.fd, 4096)
    except OSError:
        return False


def _is_odd(path: Path) -> bool:
    try:
        return not stat.S_ISREG(os.lstat(path).st_mode)
    except FileNotFoundError:
        return False


def _failure(error: sqlite3.Error | UnicodeDecodeError) -> IndexFailed:
    machine = (
        isinstance(error, sqlite3.OperationalError) and error.sqlite_errorcode & 0xFF not in _ALSO_DAMAGE
    )
    kind = IndexFailed if machine else IndexDamaged
    return kind(f"the index failed: {error!r}")
