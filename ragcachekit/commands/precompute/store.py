"""The store that precompute encodes into: it counts, and lists what would be encoded before anything is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ragcachekit.model.kv import ChunkKV
from ragcachekit.store.base import Found, KVStore, LayerSource, StoreStats
from ragcachekit.types import KVKey


class WatchedStore:
    """Another store, which counts what is put into it and can pretend to hold everything already.

    Attributes
    ----------
    kept, failed : int
        Entries that the store took, and that it did not.
    tokens, nbytes : int
        Of those that it took.
    """

    def __init__(self, store: KVStore) -> None:
        self._store = store
        self._asked: list[KVKey] | None = None
        self.kept = self.failed = self.tokens = self.nbytes = 0

    @contextmanager
    def pretending(self) -> Iterator[list[KVKey]]:
        """Meanwhile nothing is encoded: the list fills with the keys that would be."""
        self._asked = []
        try:
            yield self._asked
        finally:
            self._asked = None

    def __contains__(self, key: KVKey) -> bool:
        if self._asked is None:
            return key in self._store
        self._asked.append(key)
        return True

    def get(self, key: KVKey, weight: float = 1.0) -> Found | None:
        """As the store."""
        return self._store.get(key, weight)

    def open(self, key: KVKey, weight: float = 1.0) -> Found | LayerSource | None:
        """As the store."""
        return self._store.open(key, weight)

    def put(self, key: KVKey, kv: ChunkKV) -> bool:
        """As the store, counted."""
        kept = self._store.put(key, kv)
        self.kept += kept
        self.failed += not kept
        self.tokens += kv.tokens if kept else 0
        self.nbytes += kv.nbytes if kept else 0
        return kept

    def discard(self, key: KVKey) -> None:
        """As the store."""
        self._store.discard(key)

    def forget(self, namespace: str, chunk_ids: frozenset[str] | None = None) -> int:
        """As the store."""
        return self._store.forget(namespace, chunk_ids)

    def stats(self) -> tuple[StoreStats, ...]:
        """As the store."""
        return self._store.stats()

    def close(self) -> None:
        """As the store."""
        self._store.close()
