"""Entries on their way between tiers, so that no forgotten one arrives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from ragcachekit.threads import Condition


class InFlightMoves:
    """Moves between tiers; one whose namespace was dropped since the entry was read is refused.

    Moves never wait; a drop waits for the moves of its own namespace.
    """

    def __init__(self) -> None:
        self._changed = Condition()
        self._moving: Counter[str] = Counter()
        self._dropping: Counter[str] = Counter()
        self._drops = 0
        self._dropped: dict[str, int] = {}  # namespace to the number of its last drop

    def now(self) -> int:
        """The number to take before an entry is read, for :meth:`move`."""
        return self._drops

    @contextmanager
    def move(self, namespace: str, since: int) -> Iterator[bool]:
        """Whether an entry may be written into another tier: not after or during a drop in its namespace."""
        with self._changed:
            may = not self._dropping[namespace] and self._dropped.get(namespace, 0) <= since
            self._moving[namespace] += may
        try:
            yield may
        finally:
            with self._changed:
                self._moving -= Counter({namespace: int(may)})  # removes zeros
                self._changed.notify_all()

    @contextmanager
    def drop(self, namespace: str) -> Iterator[None]:
        """A block in which tiers forget and nothing of the namespace moves."""
        with self._changed:
            self._dropping[namespace] += 1
        try:
            self._changed.wait_for(lambda: not self._moving[namespace])
            yield
        finally:
            with self._changed:
                self._dropping -= Counter([namespace])
                self._drops += 1
                self._dropped[namespace] = self._drops
