"""Uses of entries that are remembered until somebody writes them down."""

from __future__ import annotations

from threading import Lock

_SOME = 256
_MOST = 16 * _SOME


class AccessLog:
    """Which entries were used, in which order. Thread safe, also after a fork."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._used: dict[str, None] = {}
        self._due = _SOME

    def __len__(self) -> int:
        return len(self._used)

    def add(self, digest: str) -> bool:
        """Remember a use; returns whether to write all down now.

        Whoever is told so and cannot do it is told again some uses later. What cannot be written for long is
        dropped: an order of use is all that is lost.
        """
        with self._lock:
            self._used.pop(digest, None)
            self._used[digest] = None
            if len(self) < self._due:
                return False
            self._due += _SOME
            if self._due > _MOST:
                self._used, self._due = {}, _SOME
            return True

    def take(self) -> list[str]:
        """What was used, least recently first; dropped here."""
        with self._lock:
            taken, self._used, self._due = list(self._used), {}, _SOME
        return taken
