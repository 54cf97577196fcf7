"""The disk tier's index: which entries there are, whose, how large, in which order they were last used.

One SQLite file, shared by all processes on the folder. It can be lost at any time: the files are the
truth, and :class:`~ragcachekit.store.disk_shelf.Shelf` rebuilds it from them. That is why its journal is
never flushed to the medium, and why it is a plain rollback journal: WAL would be a little quicker, but
maps a file into memory (cut short, that is a SIGBUS) and does not work on network file systems.

Not diskcache: its rows would be values in an order of insertion, so that each use deletes and inserts
one, quotas have no query, and its default is pickle (CVE-2025-69872).
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock

from ragcachekit.errors import StoreError
from ragcachekit.store.folder import locked, open_folder, release
from ragcachekit.store.process import PerProcess

_NAME = "cache.db"
_AT_ONCE = 500  # values that a statement is given; SQLite takes at least 999
SECONDS_TO_LOCK = 5.0
"""How long work that changes the folder waits for others who do."""

_SCHEMA = (
    # The order of use is the row id: the oldest row is the first, and any index on a column has it behind.
    "CREATE TABLE entries (used INTEGER PRIMARY KEY, digest TEXT NOT NULL, namespace TEXT NOT NULL, "
    "nbytes INTEGER NOT NULL)",
    "CREATE UNIQUE INDEX by_digest ON entries (digest)",
    "CREATE INDEX by_namespace ON entries (namespace)",
    # Kept by the statements below in the same transaction as the rows, not by triggers: a flipped bit in a
    # trigger's text would go on counting wrongly.
    "CREATE TABLE totals (namespace TEXT PRIMARY KEY, entries INTEGER NOT NULL, nbytes INTEGER NOT NULL) "
    "WITHOUT ROWID",
)
_SETTINGS = (
    "PRAGMA trusted_schema = OFF",
    "PRAGMA cell_size_check = ON",
    "PRAGMA mmap_size = 0",
    "PRAGMA journal_mode = PERSIST",
    "PRAGMA synchronous = OFF",
)
_COUNTER = slice(24, 28)  # of the file: SQLite's change counter
_NEXT = "(SELECT IFNULL(MAX(used), 0) + 1 FROM entries)"

# What the machine is to blame for; rebuilding would help against none of it. That a file cannot be written
# (SQLITE_READONLY) is not among it: so says a flipped bit, and a file of its own can be replaced.
_NOT_DAMAGE = {
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_INTERRUPT,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_PROTOCOL,
}

# The second, if a damaged schema is no text: sqlite3 cannot even decode the message that says so.
_FAILURES = (sqlite3.Error, UnicodeDecodeError)


class IndexFailed(StoreError):
    """The index is closed, locked for too long, or cannot be written."""


class IndexDamaged(IndexFailed):
    """The index is gone, or is not what was written to it: it has to be rebuilt."""


class EntryIndex:
    """Digest → namespace and file size, oldest use first. All but ``close`` belongs inside a session.

    Raises
    ------
    StoreError
        If ``folder`` cannot be used.
    """

    def __init__(self, folder: Path) -> None:
        open_folder(folder)
        self._path = folder / _NAME
        self._lock_path = folder / "lock"
        self._mutex = PerProcess(Lock)
        self._connection: sqlite3.Connection | None = None
        self._fd = -1  # of the same file
        self._of: tuple[int, int, int] | None = None
        self._inherited: list[sqlite3.Connection] = []
        self._closed = False

    @contextmanager
    def session(self, *, create: bool = False, seconds: float = SECONDS_TO_LOCK) -> Iterator[None]:
        """A transaction that no other thread or process can come between.

        It is committed even if the body raises: rows follow what happened to files, and files have no
        rollback. Sessions do not nest.

        Parameters
        ----------
        create : bool
            Begin an index where there is none; otherwise that is damage.
        seconds : float
            How long to wait while somebody else is at work.

        Raises
        ------
        IndexDamaged, IndexFailed
            For whatever SQLite or a damaged row brings up; nothing is changed then.
        """
        with self._alone(seconds):
            try:
                self._begin(create)
                with self._committed():
                    yield
            except _FAILURES as error:
                self._disconnect()  # takes back what was not committed
                raise _failure(error) from error

    def revision(self) -> bytes:
        """What every commit changes; asked for in a session, after its :meth:`commit`."""
        return os.pread(self._fd, _COUNTER.stop - _COUNTER.start, _COUNTER.start)

    @contextmanager
    def standstill(self, revision: bytes) -> Iterator[bool]:
        """Keep others out as a session does; tells whether nothing was changed since ``revision``.

        For whoever only has to know that: a transaction costs many times as much. IndexFailed as there.
        """
        with self._alone(SECONDS_TO_LOCK):
            try:
                status = os.lstat(self._path)
                same = self._of == (os.getpid(), status.st_dev, status.st_ino) and self.revision() == revision
            except OSError:
                same = False
            yield same

    @contextmanager
    def _alone(self, seconds: float) -> Iterator[None]:
        mutex = self._mutex.get()
        if not mutex.acquire(timeout=seconds):
            raise IndexFailed("another thread is busy with the index")
        try:
            with self._held(seconds):
                yield
        finally:
            mutex.release()

    @contextmanager
    def _committed(self) -> Iterator[None]:
        try:
            yield
        except _FAILURES:
            raise
        except BaseException:
            self.commit()
            raise
        self.commit()

    def commit(self) -> None:
        """Commit what was changed; from here to its end, the session keeps others out but changes no more."""
        if self._connected().in_transaction:
            self._execute("COMMIT")

    def discard(self, seconds: float = SECONDS_TO_LOCK) -> None:
        """Remove the files of a damaged index. No session is under way meanwhile, in no process."""
        with self._mutex.get(), self._held(seconds):
            self._disconnect()
            for suffix in ("", "-journal", "-wal", "-shm"):
                self._path.with_name(_NAME + suffix).unlink(missing_ok=True)

    def check(self) -> None:
        """Raise unless it can be written, and tables, indexes and sums agree and every row makes sense."""
        self._execute("PRAGMA user_version = 0")
        for (found,) in self._execute("PRAGMA integrity_check(1)"):
            if found != "ok":
                raise sqlite3.DatabaseError(str(found))
        sums = "SELECT namespace, COUNT(*), SUM(nbytes) FROM entries GROUP BY namespace ORDER BY namespace"
        kept = "SELECT namespace, entries, nbytes FROM totals WHERE entries ORDER BY namespace"
        if self._execute(sums).fetchall() != self._execute(kept).fetchall():
            raise sqlite3.DatabaseError("an index whose sums are wrong")

    def rows(self) -> dict[str, int]:
        """Digest → file size, least recently used first."""
        return dict(self._execute("SELECT digest, nbytes FROM entries ORDER BY used").fetchall())

    def owners(self) -> dict[str, str]:
        """Digest → namespace."""
        return dict(self._execute("SELECT digest, namespace FROM entries").fetchall())

    def nbytes(self, namespace: str | None = None) -> int:
        """Sum of all sizes, or of those of one namespace."""
        if namespace is None:
            return self._number("SELECT IFNULL(SUM(nbytes), 0) FROM totals")
        return self._number("SELECT IFNULL(SUM(nbytes), 0) FROM totals WHERE namespace = ?", namespace)

    def __len__(self) -> int:
        return self._number("SELECT IFNULL(SUM(entries), 0) FROM totals")

    def namespaces(self) -> list[str]:
        """Whose entries there are."""
        return [name for (name,) in self._execute("SELECT namespace FROM totals WHERE entries")]

    def size(self, digest: str) -> int:
        """File size of an entry; 0 if there is none."""
        return self._number("SELECT IFNULL(SUM(nbytes), 0) FROM entries WHERE digest = ?", digest)

    def oldest(self, but: str, namespace: str | None = None) -> str:
        """The least recently used entry (of a namespace) but one.

        That there is none means that the sums are wrong: whoever asks found them too large.
        """
        whose, values = ("", (but,)) if namespace is None else ("AND namespace = ?", (but, namespace))
        row = self._execute(
            f"SELECT digest FROM entries WHERE digest != ? {whose} ORDER BY used LIMIT 1", values
        ).fetchone()
        if row is None or not isinstance(row[0], str):
            raise sqlite3.DatabaseError("an index whose sizes do not add up")
        return row[0]

    def held(self, digest: str) -> tuple[int, int]:
        """Both :meth:`size` of an entry and the sum of all sizes, in one step."""
        held, total = self._execute(
            "SELECT (SELECT IFNULL(SUM(nbytes), 0) FROM entries WHERE digest = ?), "
            "(SELECT IFNULL(SUM(nbytes), 0) FROM totals)",
            (digest,),
        ).fetchone()
        return _size(held), _size(total)

    def add(self, digest: str, namespace: str, nbytes: int, new: bool = False) -> None:
        """Add or replace an entry as the most recently used one; ``new``: there is none to be replaced."""
        if not new:
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

    def touch(self, digests: Sequence[str]) -> list[str]:
        """Make entries, in this order, the most recently used ones; returns those that are not here."""
        (first,) = self._execute(f"SELECT {_NEXT}").fetchone()
        numbered = [(first + n, digest) for n, digest in enumerate(digests)]
        update = "UPDATE entries SET used = ? WHERE digest = ?"
        if self._connected().executemany(update, numbered).rowcount == len(digests):
            return []
        return [digest for digest in digests if not self.size(digest)]

    def among(self, digests: Iterable[str]) -> list[str]:
        """Those that have a row."""
        asked, found = list(digests), []
        for at in range(0, len(asked), _AT_ONCE):
            some = tuple(asked[at : at + _AT_ONCE])
            marks = ",".join("?" * len(some))
            found += self._execute(f"SELECT digest FROM entries WHERE digest IN ({marks})", some).fetchall()
        return [digest for (digest,) in found]

    def remove(self, digest: str) -> None:
        """Forget an entry; no error if there is none."""
        found = self._execute("SELECT used, namespace, nbytes FROM entries WHERE digest = ?", (digest,))
        row = found.fetchone()
        if row is None:
            return
        used, namespace, nbytes = row
        if self._execute("DELETE FROM entries WHERE used = ? AND digest = ?", (used, digest)).rowcount != 1:
            raise sqlite3.DatabaseError("an index whose parts disagree")
        self._execute(
            "UPDATE totals SET entries = entries - 1, nbytes = nbytes - ? WHERE namespace = ?",
            (nbytes, namespace),
        )

    def close(self) -> None:
        """Close the connection; further sessions fail."""
        with self._mutex.get():
            self._closed = True
            self._disconnect()

    def _execute(self, statement: str, values: tuple[str | int, ...] = ()) -> sqlite3.Cursor:
        return self._connected().execute(statement, values)

    def _connected(self) -> sqlite3.Connection:
        if self._connection is None:
            raise sqlite3.DatabaseError("no session")
        return self._connection

    def _number(self, statement: str, *values: str) -> int:
        (number,) = self._execute(statement, values).fetchone()
        return _size(number)

    @contextmanager
    def _held(self, seconds: float) -> Iterator[None]:
        """The lock of the index. SQLite has locks of its own, but they cannot guard :meth:`discard`."""
        by = os.getpid()
        try:
            try:
                fd = locked(self._lock_path, seconds)
            except FileNotFoundError:  # the folder was deleted by hand
                open_folder(self._path.parent)
                fd = locked(self._lock_path, seconds)
        except OSError as error:
            raise IndexFailed(f"the index is locked: {error}") from error
        try:
            yield
        finally:
            release(fd, by)

    def _begin(self, create: bool) -> None:
        if self._closed:
            raise IndexFailed("the index is closed")
        status = self._status(create)
        of = (os.getpid(), status.st_dev, status.st_ino)
        if self._connection is None or of != self._of:  # forked, or another process replaced the file
            self._disconnect()
            self._of = of
            self._connection = sqlite3.connect(
                self._path, timeout=SECONDS_TO_LOCK, isolation_level=None, check_same_thread=False
            )
            self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            for setting in _SETTINGS:
                self._execute(setting).fetchall()
            self._execute("BEGIN IMMEDIATE")
            self._check_schema(create)
        else:
            self._execute("BEGIN IMMEDIATE")

    def _status(self, create: bool) -> os.stat_result:
        # SQLite gives its files the mode of the database, so that exists, with 0600, before it.
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        with suppress(FileNotFoundError):
            return os.lstat(self._path)
        if not create:
            raise IndexDamaged("the index is gone")
        try:
            fd = os.open(self._path, flags | os.O_CREAT, 0o600)
        except OSError as error:
            raise IndexFailed(f"the index cannot be created: {error}") from error
        try:
            return os.fstat(fd)
        finally:
            os.close(fd)

    def _check_schema(self, create: bool) -> None:
        found = [sql for (sql,) in self._execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")]
        if not found and create:
            for statement in _SCHEMA:
                self._execute(statement)
        elif found != list(_SCHEMA):
            raise sqlite3.DatabaseError("an index of another kind")

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        fd, self._fd = self._fd, -1
        if fd >= 0:  # frees what locks SQLite has of the file, which is about to do so itself
            os.close(fd)
        if connection is None:
            return
        if self._of and self._of[0] != os.getpid():
            self._inherited.append(connection)  # closing it would end the parent's locks: it is left alone
            return
        with suppress(sqlite3.Error):
            connection.close()


def _size(number: object) -> int:
    if not isinstance(number, int) or number < 0:
        raise sqlite3.DatabaseError("an index with a size that is no number")
    return number


def _failure(error: sqlite3.Error | UnicodeDecodeError) -> IndexFailed:
    code = getattr(error, "sqlite_errorcode", None)
    kind = IndexFailed if code is not None and code & 0xFF in _NOT_DAMAGE else IndexDamaged
    return kind(f"the index failed: {error!r}")
