"""Least recently used."""

from __future__ import annotations

from ragcachekit.store.eviction.base import Access, Record


class Lru:
    """The entry whose last access is longest ago leaves first."""

    name = "lru"

    def accessed(self, record: Record, access: Access, now: int) -> None:
        """Rank by the last access."""
        record.priority = float(now)

    def evicted(self, record: Record) -> None:
        """Nothing to learn."""
