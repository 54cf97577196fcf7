"""Entries on their way between tiers, so that no forgotten one arrives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from ragcachekit.threads import Condition
from ragcachekit.types import KVKey


class InFlightMoves:
    """Moves between tiers; one whose namespace was dropped since the entry was read is refused.

    Moves never wait; a drop waits for the moves of its own namespace.
    """

    def __init__(self) -> None:
        self._changed = Condition()
        self._under_way: set[tuple[int, KVKey]] = set()
        self._dropping: Counter[str] = Counter()
        self._drops = 0
        self._dropped: dict[str, int] = {}  # namespace to the number of its last drop

    def now(self) -> int:
        """The number to take before an entry is read, for :meth:`move`."""
        return self._drops

    @contextmanager
    def move(self, key: KVKey, place: int, since: int) -> Iterator[bool]:
        """Whether ``key`` may be written into tier ``place``; a drop waits until this is left.

        False after or during a drop in its namespace, or if another thread moves the same entry.
        """
        with self._changed:
            namespace = key.namespace
            stale = self._dropping[namespace] or self._dropped.get(namespace, 0) > since
            may = not stale and (place, key) not in self._under_way
            if may:
                self._under_way.add((place, key))
        try:
            yield may
        finally:
            if may:
                with self._changed:
                    self._under_way.discard((place, key))
                    self._changed.notify_all()

    @contextmanager
    def drop(self, namespace: str) -> Iterator[None]:
        """A block in which tiers forget and nothing of the namespace moves."""
        with self._changed:
            self._dropping[namespace] += 1
        try:
            self._changed.wait_for(lambda: all(k.namespace != namespace for _, k in self._under_way))
            yield
        finally:
            with self._changed:
                self._dropping -= Counter([namespace])  # removes zeros
                self._drops += 1
                self._dropped[namespace] = self._drops
