"""Least recently used."""

from __future__ import annotations

from ragcachekit.store.eviction.base import Access, EvictionPolicy, Record


class Lru(EvictionPolicy):
    """The entry whose last access is longest ago is evicted first."""

    def accessed(self, record: Record, access: Access, now: int) -> None:
        record.priority = float(now)
