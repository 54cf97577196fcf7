"""Greedy dual size frequency, with a cost that is proportional to size."""

from __future__ import annotations

from ragcachekit.store.eviction.base import Access, EvictionPolicy, Record
from ragcachekit.store.eviction.window import Seconds, Window


class Gdsf(EvictionPolicy):
    """Priority = clock + frequency x cost / size, where cost / size is 1 (RAGCache sections 5.1 and 7.4).

    The clock is the highest priority that was evicted, so that old frequent use ends up below present use.
    ``window`` is as in :class:`~ragcachekit.store.eviction.window.Window`.
    """

    def __init__(self, window: int | Seconds | None = None) -> None:
        self._window = Window(window)
        self.clock = 0.0

    def accessed(self, record: Record, access: Access, now: int) -> None:
        record.priority = self.clock + self._window.count(record, access, now)

    def evicted(self, record: Record) -> None:
        self.clock = max(self.clock, record.priority)
