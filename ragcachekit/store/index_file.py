"""The SQLite file of the disk tier's index: shared by processes, changed by one at a time, lost at any time.

Its journal is never flushed to the medium, since the index can be rebuilt, and is a plain rollback journal:
WAL would be a little quicker, but maps a file into memory (cut short, that is a SIGBUS) and does not work on
network file systems.
"""

from __future__ import annotations

import os
import sqlite3
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import RLock

from ragcachekit.errors import StoreError
from ragcachekit.files import open_regular
from ragcachekit.store.folder import locked, open_folder, release

_NAME = "cache.db"
_SUFFIXES = ("", "-journal", "-wal", "-shm")
SECONDS_TO_LOCK = 5.0
"""How long work that changes the folder waits for others who do."""

_SETTINGS = (
    "PRAGMA trusted_schema = OFF",
    "PRAGMA cell_size_check = ON",
    "PRAGMA mmap_size = 0",
    "PRAGMA journal_mode = PERSIST",
    "PRAGMA synchronous = OFF",
)

Revision = tuple[int, int, int, int, bytes]
"""Process, how many of its connections have ended, the file, and how often that was changed."""

_COUNTER = slice(24, 28)  # of the file: SQLite's change counter

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


class IndexFile:
    """Sessions over the file. All but ``standstill``, ``discard`` and ``close`` belongs inside one.

    Parameters
    ----------
    folder : Path
        Made by :meth:`open`, and again where it is missing later.
    schema : sequence of str
        The statements that make the tables; a file of another schema is damage.
    """

    def __init__(self, folder: Path, schema: Sequence[str]) -> None:
        self._schema = schema
        self._path = folder / _NAME
        self._lock_path = folder / "lock"
        self._mutex = RLock()
        self._connection: sqlite3.Connection | None = None
        self._ended = 0  # connections; one that is open keeps the file's inode from being used again
        self._of: tuple[int, int, int] | None = None
        self._inherited: list[sqlite3.Connection] = []
        self._closed = self._checked = False

    def open(self) -> None:
        """Make the folder; StoreError if it cannot be used."""
        open_folder(self._path.parent)

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

    def revision(self) -> Revision | None:
        """What every commit changes; None if it cannot be read. Asked for in a session, after :meth:`commit`.

        Read from the file, since SQLite itself takes all its locks for that. Closing the file frees those
        that this process has of it: there are none, as whoever has some is in a session.
        """
        try:
            with open_regular(self._path, os.O_RDONLY | os.O_NOFOLLOW) as file:
                status = os.fstat(file.fd)
                counter = os.pread(file.fd, _COUNTER.stop - _COUNTER.start, _COUNTER.start)
        except OSError:
            return None
        return os.getpid(), self._ended, status.st_dev, status.st_ino, counter

    @contextmanager
    def standstill(self, revision: Revision | None) -> Iterator[bool]:
        """Keep others out as a session does; tells whether nothing was changed since ``revision``.

        For whoever only has to know that: a session costs twice as much. IndexFailed as there.
        """
        with self._alone(SECONDS_TO_LOCK):
            yield revision is not None and self.revision() == revision

    @contextmanager
    def _alone(self, seconds: float) -> Iterator[None]:
        mutex = self._mutex
        try:  # begun before it is taken: a KeyboardInterrupt may come as soon as it is
            if not mutex.acquire(timeout=seconds):
                raise IndexFailed("another thread is busy with the index")
            with self._held(seconds):
                yield
        finally:
            try:  # noqa: SIM105 (for the same reason: a call of ``suppress`` comes before the release)
                mutex.release()
            except RuntimeError:  # another thread's
                pass

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
        if self._connection is not None and self._connection.in_transaction:
            self._execute("COMMIT")

    def discard(self, seconds: float = SECONDS_TO_LOCK) -> None:
        """Remove the files of a damaged index. No session is under way meanwhile, in no process."""
        with self._mutex, self._held(seconds):
            self._disconnect()
            for suffix in _SUFFIXES:
                self._path.with_name(_NAME + suffix).unlink(missing_ok=True)

    def close(self) -> None:
        """Close the connection; further sessions fail."""
        with self._mutex:
            self._closed = True
            self._disconnect()

    def _execute(self, statement: str, values: tuple[str | int, ...] = ()) -> sqlite3.Cursor:
        return self._connected().execute(statement, values)

    def _connected(self) -> sqlite3.Connection:
        if self._connection is None:
            raise sqlite3.DatabaseError("no session")
        return self._connection

    @contextmanager
    def _held(self, seconds: float) -> Iterator[None]:
        """The lock of the index. SQLite has locks of its own, but they cannot guard :meth:`discard`."""
        by = os.getpid()
        try:
            try:
                file = locked(self._lock_path, seconds)
            except FileNotFoundError:  # the folder was deleted by hand
                open_folder(self._path.parent)
                file = locked(self._lock_path, seconds)
        except (OSError, StoreError) as error:
            raise IndexFailed(f"the index is locked: {error}") from error
        try:
            yield
        finally:
            release(file, by)

    def _begin(self, create: bool) -> None:
        if self._closed:
            raise IndexFailed("the index is closed")
        status = self._status(create)
        of = (os.getpid(), status.st_dev, status.st_ino)
        fresh = self._connection is not None and not self._connection.in_transaction and self._checked
        if not fresh or of != self._of:  # interrupted, forked, or another process replaced the file
            self._disconnect()
            self._of = of
            self._refuse_others()
            self._connection = sqlite3.connect(
                self._path, timeout=SECONDS_TO_LOCK, isolation_level=None, check_same_thread=False
            )
            for setting in _SETTINGS:
                self._execute(setting).fetchall()
            self._execute("BEGIN IMMEDIATE")
            self._check_schema(create)
            self._checked = True
        else:
            self._execute("BEGIN IMMEDIATE")

    def _status(self, create: bool) -> os.stat_result:
        # SQLite gives its files the mode of the database, so that exists, with 0600, before it.
        with suppress(FileNotFoundError):
            return os.lstat(self._path)
        if not create:
            raise IndexDamaged("the index is gone")
        try:
            with open_regular(self._path, os.O_RDWR | os.O_NOFOLLOW | os.O_CREAT) as file:
                return os.fstat(file.fd)
        except OSError as error:
            raise IndexFailed(f"the index cannot be created: {error}") from error

    def _refuse_others(self) -> None:
        """IndexDamaged if something else stands under a name that SQLite opens: it would wait for a FIFO."""
        for suffix in _SUFFIXES:
            path = self._path.with_name(_NAME + suffix)
            with suppress(FileNotFoundError):
                if not stat.S_ISREG(os.lstat(path).st_mode):
                    raise IndexDamaged(f"{path.name} is not a regular file")

    def _check_schema(self, create: bool) -> None:
        found = [sql for (sql,) in self._execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")]
        if not found and create:
            for statement in self._schema:
                self._execute(statement)
        elif found != list(self._schema):
            raise sqlite3.DatabaseError("an index of another kind")

    def _disconnect(self) -> None:
        self._checked = False
        connection, self._connection = self._connection, None
        if connection is None:
            return
        self._ended += 1
        if self._of and self._of[0] != os.getpid():
            self._inherited.append(connection)  # closing it would end the parent's locks: it is left alone
            return
        with suppress(sqlite3.Error):
            connection.close()


def _failure(error: sqlite3.Error | UnicodeDecodeError) -> IndexFailed:
    code = getattr(error, "sqlite_errorcode", None)
    kind = IndexFailed if code is not None and code & 0xFF in _NOT_DAMAGE else IndexDamaged
    return kind(f"the index failed: {error!r}")
