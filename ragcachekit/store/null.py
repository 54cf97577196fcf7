"""The store that keeps nothing: the baseline that every cache is compared with."""

from __future__ import annotations

from ragcachekit.model.kv import ChunkKV
from ragcachekit.store.base import Found, LayerSource, StoreStats
from ragcachekit.store.counters import Counters
from ragcachekit.types import KVKey


class NullStore:
    """Every ``get`` is a miss and every ``put`` is refused."""

    def __init__(self) -> None:
        self._counters = Counters("null")

    def get(self, key: KVKey, weight: float = 1.0) -> Found | None:
        """Always None."""
        self._counters.count("misses")
        return None

    def open(self, key: KVKey, weight: float = 1.0) -> Found | LayerSource | None:
        """As :meth:`get`."""
        return self.get(key, weight)

    def put(self, key: KVKey, kv: ChunkKV) -> bool:
        """Always False; not a failure, so not counted as one."""
        return False

    def __contains__(self, key: KVKey) -> bool:
        return False

    def discard(self, key: KVKey) -> None:
        """Nothing to drop."""

    def forget(self, namespace: str, chunk_ids: frozenset[str] | None = None) -> int:
        """Always 0."""
        return 0

    def stats(self) -> tuple[StoreStats, ...]:
        """One record that counts misses only."""
        return (self._counters.stats(entries=0, nbytes=0, budget=0),)

    def close(self) -> None:
        """Nothing to release."""
