"""The host memory tier: least recently used entries leave first, within a byte budget."""

from __future__ import annotations

from collections import OrderedDict
from threading import RLock

from ragcachekit.model.kv import ChunkKV
from ragcachekit.store.base import Evicted, Found, LayerSource, StoreStats, concerns
from ragcachekit.store.counters import Counters
from ragcachekit.types import KVKey


class HostStore:
    """Chunk KV in main memory, kept by reference (tensors are shared and never written to).

    Parameters
    ----------
    budget : int
        Bytes that all keys and values may take together; > 0.

    Notes
    -----
    ``ChunkKV.nbytes`` is what counts. Tensors that are slices of a larger buffer keep all of that
    buffer alive, so an encoder that works in batches hands over copies.
    """

    def __init__(self, budget: int) -> None:
        if budget <= 0:
            raise ValueError(
                f"the host tier's budget must be > 0 bytes, got {budget}; leave the tier out instead"
            )
        self._budget = budget
        self._entries: OrderedDict[KVKey, ChunkKV] = OrderedDict()
        self._nbytes = 0
        self._closed = False
        self._lock = RLock()
        self._counters = Counters("host")

    def get(self, key: KVKey, worth: float = 1.0) -> Found | None:
        """The entry under ``key``, now the most recently used one, or None."""
        with self._lock:
            kv = self._entries.get(key)
            if kv is None:
                self._counters.count("misses")
                return None
            self._entries.move_to_end(key)
            self._counters.count("hits")
            return Found(kv, "host")

    def open(self, key: KVKey, worth: float = 1.0) -> Found | LayerSource | None:
        """As :meth:`get`."""
        return self.get(key, worth)

    def put(self, key: KVKey, kv: ChunkKV) -> bool:
        """Keep ``kv``, evicting least recently used entries; False if it exceeds the whole budget."""
        with self._lock:
            if self._closed:
                return False
            if kv.nbytes > self._budget:
                self._counters.count("failed_writes")
                self._counters.warn_once(
                    "large", "entry of %d bytes exceeds the budget %d", kv.nbytes, self._budget
                )
                return False
            self._remove(key)
            while self._nbytes + kv.nbytes > self._budget:
                self._remove(next(iter(self._entries)))
                self._counters.count("evictions")
            self._entries[key] = kv
            self._nbytes += kv.nbytes
            return True

    def admit(self, key: KVKey, kv: ChunkKV) -> tuple[bool, Evicted]:
        """As :meth:`put`; nobody is handed down."""
        return self.put(key, kv), ()

    def __contains__(self, key: KVKey) -> bool:
        with self._lock:
            return key in self._entries

    def drop(self, namespace: str, chunk_ids: frozenset[str] | None = None) -> frozenset[str]:
        """As :meth:`forget`, returning the digests of the dropped keys."""
        with self._lock:
            doomed = [key for key in self._entries if concerns(key, namespace, chunk_ids)]
            for key in doomed:
                self._remove(key)
        return frozenset(key.digest() for key in doomed)

    def forget(self, namespace: str, chunk_ids: frozenset[str] | None = None) -> int:
        """Drop the namespace's entries that hold, or were encoded behind, one of ``chunk_ids``."""
        return len(self.drop(namespace, chunk_ids))

    def stats(self) -> tuple[StoreStats, ...]:
        """One record."""
        with self._lock:
            return (
                self._counters.stats(entries=len(self._entries), nbytes=self._nbytes, budget=self._budget),
            )

    def close(self) -> None:
        """Let go of all entries; further calls are misses."""
        with self._lock:
            self._closed = True
            self._entries.clear()
            self._nbytes = 0

    def _remove(self, key: KVKey) -> None:
        kv = self._entries.pop(key, None)
        if kv is not None:
            self._nbytes -= kv.nbytes
