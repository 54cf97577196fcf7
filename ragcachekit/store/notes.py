"""Uses of entries that are remembered until somebody writes them down."""

from __future__ import annotations

from threading import Lock

_SOME = 256
_MOST = 16 * _SOME


class Notes:
    """Which entries were used, in which order, and which were not there. Thread safe, also after a fork."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._used: dict[str, None] = {}
        self._missed: set[str] = set()
        self._due = _SOME

    def __len__(self) -> int:
        return len(self._used) + len(self._missed)

    def add(self, digest: str, found: bool) -> bool:
        """Remember a use; returns whether to write all down now.

        Whoever is told so and cannot do it is told again some uses later. What cannot be written for long is
        let go: an order of use is all that is lost.
        """
        with self._lock:
            self._used.pop(digest, None)
            if found:
                self._used[digest] = None
            else:
                self._missed.add(digest)
            if len(self) < self._due:
                return False
            self._due += _SOME
            if self._due > _MOST:
                self._clear()
            return True

    def take(self) -> tuple[list[str], set[str]]:
        """What was used, least recently first, and what was not there; forgotten here."""
        with self._lock:
            taken = list(self._used), self._missed
            self._clear()
        return taken

    def _clear(self) -> None:
        self._used, self._missed, self._due = {}, set(), _SOME
