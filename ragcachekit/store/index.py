"""The disk tier's index: which entries there are, whose, how large, in which order they were last used.

It can be lost at any time: the files are the truth, and :class:`~ragcachekit.store.disk_shelf.Shelf` rebuilds
it from them.

Not diskcache: its rows would be values in an order of insertion, so that each use deletes and inserts
one, quotas have no query, and its default is pickle (CVE-2025-69872).
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from pathlib import Path

from ragcachekit.store.index_file import IndexFile

_AT_ONCE = 500  # values that a statement is given; SQLite takes at least 999
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
_NEXT = "(SELECT IFNULL(MAX(used), 0) + 1 FROM entries)"


class EntryIndex(IndexFile):
    """Digest → namespace and file size, oldest use first. All of it belongs inside a session."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, _SCHEMA)

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

    def _number(self, statement: str, *values: str) -> int:
        (number,) = self._execute(statement, values).fetchone()
        return _size(number)


def _size(number: object) -> int:
    if not isinstance(number, int) or number < 0:
        raise sqlite3.DatabaseError("an index with a size that is no number")
    return number
