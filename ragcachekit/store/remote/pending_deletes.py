"""Deletions that a service has not confirmed yet, in bounded memory."""

from __future__ import annotations

from threading import Lock

from ragcachekit.types import KVKey

MOST_IDS = 10_000
"""Chunk ids per namespace; with more, the whole namespace is deleted."""


class PendingDeletes:
    """Per namespace, the chunk ids still to be deleted; None for the whole namespace. Thread safe.

    Each id has the number of its last forget, so that confirming a forget excludes later ones.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._numbers: dict[str, dict[str | None, int]] = {}
        self.count = 0  # forgets, confirmed or not

    def __len__(self) -> int:
        """Number of namespaces with pending deletions."""
        return len(self._numbers)

    def __contains__(self, namespace: str) -> bool:
        return namespace in self._numbers

    def concern(self, key: KVKey) -> bool:
        """Whether an entry is still to be deleted."""
        with self._lock:
            ids = self._numbers.get(key.namespace)
            return ids is not None and any(name in ids for name in (None, key.chunk_id, *key.context))

    def add(self, namespace: str, chunk_ids: frozenset[str] | None) -> None:
        """Remember a forget until it is confirmed."""
        with self._lock:
            self.count += 1
            ids = self._numbers.setdefault(namespace, {})
            ids.update(dict.fromkeys([None] if chunk_ids is None else chunk_ids, self.count))
            if None in ids or len(ids) > MOST_IDS:
                self._numbers[namespace] = {None: self.count}

    def namespaces(self) -> list[str]:
        """Namespaces with pending deletions."""
        with self._lock:
            return list(self._numbers)

    def of(self, namespace: str) -> tuple[frozenset[str] | None, int]:
        """The chunk ids to be deleted (None: all), and the number to confirm them with."""
        with self._lock:
            ids = self._numbers.get(namespace, {})
            named = frozenset(name for name in ids if name is not None)
            return (None if None in ids else named), self.count

    def confirm(self, namespace: str, number: int) -> None:
        """Drop the deletions of a namespace up to this number: the service has confirmed them."""
        with self._lock:
            ids = self._numbers.get(namespace, {})
            left = {name: last for name, last in ids.items() if last > number}
            if left:
                self._numbers[namespace] = left
            else:
                self._numbers.pop(namespace, None)
