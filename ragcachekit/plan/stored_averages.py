"""Which chunks have mean KV in the store, whatever other chunks were behind it (encoder ``average:n``)."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from ragcachekit.store.base import concerns
from ragcachekit.types import KVKey

KIND = "average:"


class StoredAverages:
    """Keys of stored mean KV by model, namespace, chunk and system text; thread safe.

    The chunks that take part in a mean are chosen when it is encoded, and may be others in the next process.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._keys: dict[tuple[str, ...], KVKey] = {}

    def add(self, keys: Iterable[KVKey]) -> None:
        """Record stored entries; those of other encoders are left out."""
        with self._lock:
            self._keys.update({_group(key): key for key in keys if key.encoding.startswith(KIND)})

    def find(self, key: KVKey) -> KVKey | None:
        """A stored mean for the chunk and the system text of ``key``; its context begins with that text."""
        with self._lock:
            return self._keys.get(_group(key))

    def discard(self, key: KVKey) -> None:
        """Remove an entry that the store has lost."""
        with self._lock:
            if self._keys.get(_group(key)) == key:
                del self._keys[_group(key)]

    def forget(self, namespace: str, chunk_ids: frozenset[str] | None = None) -> None:
        """Drop what ``store.forget`` with the same arguments drops."""
        with self._lock:
            kept = {g: key for g, key in self._keys.items() if not concerns(key, namespace, chunk_ids)}
            self._keys = kept


def _group(key: KVKey) -> tuple[str, ...]:
    return key.fingerprint, key.namespace, key.chunk_id, key.context[0]
