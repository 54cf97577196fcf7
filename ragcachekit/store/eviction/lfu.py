"""Least frequently used."""

from __future__ import annotations

from ragcachekit.store.eviction.base import Access, Record
from ragcachekit.store.eviction.window import Seconds, Window


class Lfu:
    """The entry with the fewest accesses leaves first; of equal ones, the one used longest ago.

    Parameters
    ----------
    window : int, Seconds or None
        None counts accesses since the entry came in; a window counts those in it,
        also from before the entry was evicted.
    """

    name = "lfu"

    def __init__(self, window: int | Seconds | None = None) -> None:
        self._window = Window(window)

    def accessed(self, record: Record, access: Access, now: int) -> None:
        """Rank by the number of accesses."""
        record.priority = self._window.count(record, access, now)

    def evicted(self, record: Record) -> None:
        """Nothing to learn."""
