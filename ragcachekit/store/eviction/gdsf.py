"""Greedy dual size frequency, with a cost that is proportional to size."""

from __future__ import annotations

from ragcachekit.store.eviction.base import Access, Record
from ragcachekit.store.eviction.window import Seconds, Window


class Gdsf:
    """Priority = clock + frequency x cost / size, where cost / size is 1 (RAGCache sections 5.1 and 7.4).

    The clock is the highest priority that was evicted. What was used often long ago ends up below what
    is used now, because the latter starts from a later clock.

    Parameters
    ----------
    window : int, Seconds or None
        None counts an entry's accesses since it came in, as the original does; a window counts
        those in it, also from before the entry was evicted.
    """

    name = "gdsf"

    def __init__(self, window: int | Seconds | None = None) -> None:
        self._window = Window(window)
        self.clock = 0.0

    def accessed(self, record: Record, access: Access, now: int) -> None:
        """Rank by frequency above the clock."""
        record.priority = self.clock + self._window.count(record, access, now)

    def evicted(self, record: Record) -> None:
        """Bring the clock up to what has left."""
        self.clock = max(self.clock, record.priority)
