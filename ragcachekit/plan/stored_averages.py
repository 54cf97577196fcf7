"""Which chunks have KV of the encoder ``average:n`` in the store, whatever other chunks it is behind."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from ragcachekit.store.base import concerns
from ragcachekit.types import KVKey

KIND = "average:"

MOST = 1 << 18
"""Entries known in all namespaces together, about 250 MB; the least recently used are dropped."""


class StoredAverages:
    """Keys of stored entries by model, namespace, chunk and system text, the latest of each; thread safe.

    The chunks that take part in a mean are chosen when it is encoded, and may be others in the next process.
    ``allow`` says of a key whether its entry may serve.
    """

    def __init__(self) -> None:
        self.allow: Callable[[KVKey], bool] = lambda _: True
        self._lock = threading.Lock()
        self._keys: dict[tuple[str, ...], KVKey] = {}

    def add(self, key: KVKey) -> KVKey | None:
        """Record a stored entry; returns the key that it replaces. Those of other encoders are left out."""
        if not key.encoding.startswith(KIND):
            return None
        with self._lock:
            replaced = self._keys.pop(_group(key), None)
            self._keys[_group(key)] = key
            if len(self._keys) > MOST:  # a store does not tell what it evicts
                del self._keys[next(iter(self._keys))]
        return replaced if replaced != key else None

    def recall(self, keys: Iterable[KVKey]) -> None:
        """Record what a store holds, the latest first."""
        for key in reversed(list(keys)):
            self.add(key)

    def find(self, key: KVKey) -> KVKey | None:
        """A stored entry for the chunk of ``key`` and the system text that its context begins with."""
        with self._lock:
            found = self._keys.pop(_group(key), None)
            if found is not None:
                self._keys[_group(key)] = found
        return found if found is not None and self.allow(found) else None

    def stored_for(self, key: KVKey) -> KVKey | None:
        """What :meth:`add` would replace, or ``key`` itself; None for keys of other encoders."""
        return self.find(key) if key.encoding.startswith(KIND) else None

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
