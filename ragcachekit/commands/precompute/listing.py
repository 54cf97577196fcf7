"""A store that can list the keys that would be encoded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ragcachekit.model.kv import ChunkKV
from ragcachekit.store.base import Found, KVStore, LayerSource, StoreStats
from ragcachekit.types import KVKey


class ListingStore:
    """Another store, which claims to hold every key while it lists them."""

    def __init__(self, store: KVStore) -> None:
        self._store = store
        self._keys: list[KVKey] | None = None
        self.get, self.open, self.put = store.get, store.open, store.put

    @contextmanager
    def listing(self) -> Iterator[list[KVKey]]:
        """Collect the keys that are looked up; meanwhile nothing is encoded."""
        self._keys = []
        try:
            yield self._keys
        finally:
            self._keys = None
