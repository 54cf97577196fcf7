"""The store that keeps nothing, the baseline for every cache."""

from __future__ import annotations

from ragcachekit.model.kv import ChunkKV
from ragcachekit.store.base import Found, KVStore, StoreStats
from ragcachekit.store.counters import Counters
from ragcachekit.types import KVKey


class NullStore(KVStore):
    """Every ``get`` is a miss and every ``put`` is refused."""

    def __init__(self) -> None:
        self._counters = Counters("null")

    def get(self, key: KVKey, weight: float = 1.0) -> Found | None:
        self._counters.count("misses")
        return None

    def put(self, key: KVKey, kv: ChunkKV) -> bool:
        """Always False; not a failure, so not counted as one."""
        return False

    def __contains__(self, key: KVKey) -> bool:
        return False

    def discard(self, key: KVKey) -> None:
        return

    def forget(self, namespace: str, chunk_ids: frozenset[str] | None = None) -> int:
        return 0

    def stats(self) -> tuple[StoreStats, ...]:
        return (self._counters.stats(entries=0, nbytes=0, budget=0),)

    def close(self) -> None:
        return
