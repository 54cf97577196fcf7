"""Least frequently used."""

from __future__ import annotations

from ragcachekit.store.eviction.base import Access, EvictionPolicy, Record
from ragcachekit.store.eviction.window import Seconds, Window


class Lfu(EvictionPolicy):
    """The entry with the fewest accesses in ``window`` is evicted first; of equal ones, the least recent.

    ``window`` is as in :class:`~ragcachekit.store.eviction.window.Window`.
    """

    def __init__(self, window: int | Seconds | None = None) -> None:
        self._window = Window(window)

    def accessed(self, record: Record, access: Access, now: int) -> None:
        record.priority = self._window.count(record, access, now)
