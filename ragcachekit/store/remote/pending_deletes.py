"""Deletions that a service has not confirmed yet, in bounded memory."""

from __future__ import annotations

from threading import Lock
from typing import NamedTuple

from ragcachekit.store.base import concerns
from ragcachekit.types import KVKey

MOST_IDS = 10_000
"""Chunk ids per namespace; with more, the whole namespace is deleted."""


class Pending(NamedTuple):
    """Chunk ids still to be deleted (None: the whole namespace), and the number of the last forget of one."""

    chunk_ids: frozenset[str] | None
    number: int


class PendingDeletes:
    """Deletions by namespace, until the service has confirmed the last forget of one. Thread safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._pending: dict[str, Pending] = {}
        self.count = 0  # forgets, confirmed or not

    def __len__(self) -> int:
        """Number of namespaces with pending deletions."""
        return len(self._pending)

    def items(self) -> list[tuple[str, Pending]]:
        """Namespaces with pending deletions."""
        with self._lock:
            return list(self._pending.items())

    def concern(self, key: KVKey) -> bool:
        """Whether an entry is still to be deleted."""
        pending = self._pending.get(key.namespace)
        return pending is not None and concerns(key, key.namespace, pending.chunk_ids)

    def add(self, namespace: str, chunk_ids: frozenset[str] | None) -> None:
        """Remember a forget until it is confirmed."""
        with self._lock:
            self.count += 1
            before = self._pending[namespace].chunk_ids if namespace in self._pending else frozenset()
            together = None if chunk_ids is None or before is None else before | chunk_ids
            if together is not None and len(together) > MOST_IDS:
                together = None
            self._pending[namespace] = Pending(together, self.count)

    def confirm(self, namespace: str, number: int) -> None:
        """The service has deleted what was pending at that number; a later forget keeps all of it pending."""
        with self._lock:
            if namespace in self._pending and self._pending[namespace].number == number:
                del self._pending[namespace]
