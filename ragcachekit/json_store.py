"""JSON values by keys in an SQLite file, shared by the processes of one machine."""

from __future__ import annotations

import json
import logging
import os
import sqlite3
import threading
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

from ragcachekit.files import OpenFile, make_folder

log = logging.getLogger(__name__)

DATABASE = "cache.db"

_SECONDS_TO_LOCK = 60.0
_SCHEMA = "CREATE TABLE IF NOT EXISTS entries (key TEXT PRIMARY KEY, value TEXT NOT NULL)"
_PUT = "INSERT INTO entries VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value"


class JsonStore:
    """A persistent mapping of strings to JSON values. Thread and process safe.

    The checksum of a value is over its key, too. One that is cut short, altered or under another key is
    missing, and so is everything where the database cannot be read: that folder is put aside as
    ``NAME.damaged-TIME`` and an empty store takes its place.

    Parameters
    ----------
    folder : path
        Made for this user alone if it does not exist (mode 0700, files 0600); OSError if it cannot be.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder).expanduser()
        make_folder(self.folder)
        self._local = threading.local()  # connections are not shared by threads, nor with forked children
        try:
            self._database()
        except sqlite3.DatabaseError as error:
            aside = self.folder.with_name(f"{self.folder.name}.damaged-{time.time_ns()}")
            log.warning("%s is damaged (%r); put aside as %s", self.folder, error, aside)
            self.folder.rename(aside)
            make_folder(self.folder)
            with self._writing():
                pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self.keys())

    def get(self, key: str) -> Any:
        """The value, or None if there is none or it is damaged."""
        name = json.dumps(key)
        try:
            row = self._database().execute("SELECT value FROM entries WHERE key = ?", (name,)).fetchone()
            if row is None:
                return None
            text = row[0]
            if not isinstance(text, str) or text[:8] != _checksum(name, text[8:]):
                raise ValueError("a damaged value")
            return json.loads(text[8:])
        except (sqlite3.DatabaseError, ValueError) as error:
            log.warning("%s: the value of %r cannot be read (%r)", self.folder, key, error)
            if isinstance(error, ValueError):  # other errors may pass
                with suppress(OSError):
                    self.delete([key])
            return None

    def put(self, values: Mapping[str, object]) -> None:
        """Store values together: all of them, or none where the process dies. OSError where it fails.

        None as a value removes its key.
        """
        texts = {json.dumps(key): json.dumps(value) for key, value in values.items() if value is not None}
        with self._writing() as database:
            self.delete(key for key, value in values.items() if value is None)
            database.executemany(_PUT, [(key, _checksum(key, text) + text) for key, text in texts.items()])

    def delete(self, keys: Iterable[str]) -> None:
        """Remove values; keys that are not there do not count. OSError where it fails."""
        with self._writing() as database:
            names = [(json.dumps(key),) for key in keys]
            database.executemany("DELETE FROM entries WHERE key = ?", names)

    def erase(self, keys: Iterable[str]) -> None:
        """:meth:`delete`, and leave no copy of the values in the files."""
        self.delete(keys)
        try:
            self._database().execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        except sqlite3.DatabaseError as error:
            raise OSError(f"cannot write to {self.folder}: {error}") from error

    def keys(self, prefix: str = "") -> list[str]:
        """Keys in the order in which they first came; none where they cannot be read."""
        try:
            rows = self._database().execute("SELECT key FROM entries ORDER BY rowid").fetchall()
            return [key for (name,) in rows if (key := json.loads(name)).startswith(prefix)]
        except (sqlite3.DatabaseError, ValueError, TypeError, AttributeError) as error:
            log.warning("%s: its keys cannot be read (%r)", self.folder, error)
            return []

    def close(self) -> None:
        """Close this thread's connection; a later call opens it again."""
        opened = self._local.__dict__.pop("opened", None)
        if opened is not None and opened[0] == os.getpid():
            opened[1].close()

    def _database(self) -> sqlite3.Connection:
        opened: tuple[int, sqlite3.Connection] | None = getattr(self._local, "opened", None)
        if opened is None or opened[0] != os.getpid():
            path = self.folder / DATABASE
            # SQLite's own would have the umask's mode. Never opened where it exists: closing would drop the
            # locks of this process's other connections, and SQLite would lose what other processes wrote.
            with suppress(FileExistsError):
                OpenFile(path, os.O_RDWR | os.O_CREAT | os.O_EXCL).close()
            database = sqlite3.connect(path, timeout=_SECONDS_TO_LOCK, isolation_level=None)
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA synchronous = NORMAL")
            database.execute("PRAGMA secure_delete = ON")
            database.execute(_SCHEMA)
            self._local.opened = opened = os.getpid(), database
        return opened[1]

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """A transaction, or the one that this thread is in."""
        try:
            database = self._database()
            if database.in_transaction:
                yield database
                return
            database.execute("BEGIN IMMEDIATE")
            try:
                yield database
            except BaseException:
                database.rollback()
                raise
            database.commit()
        except sqlite3.DatabaseError as error:
            raise OSError(f"cannot write to {self.folder}: {error}") from error


def _checksum(name: str, text: str) -> str:
    return f"{zlib.crc32(f'{name}{text}'.encode()):08x}"
