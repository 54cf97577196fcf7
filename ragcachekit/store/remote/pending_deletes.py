"""Forgets that a service has not confirmed yet, in bounded memory."""

from __future__ import annotations

from threading import Lock

from ragcachekit.types import KVKey

MOST_IDS = 10_000
"""Chunk ids per namespace that are remembered; beyond that, the whole namespace is forgotten."""


class PendingDeletes:
    """Per namespace, the chunk ids that are still to be forgotten there. Thread safe.

    Each carries the number of its last forget, so that confirming one forget leaves out those that came
    after it. The id None stands for the whole namespace.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._numbers: dict[str, dict[str | None, int]] = {}
        self.count = 0
        """Forgets so far, confirmed or not."""

    def __len__(self) -> int:
        """Namespaces with pending forgets."""
        return len(self._numbers)

    def __contains__(self, namespace: str) -> bool:
        return namespace in self._numbers

    def concern(self, key: KVKey) -> bool:
        """Whether an entry is still to be forgotten."""
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
        """Those with pending forgets."""
        with self._lock:
            return list(self._numbers)

    def of(self, namespace: str) -> tuple[frozenset[str] | None, int]:
        """The chunk ids to be forgotten (None: all of the namespace), and the number to confirm them with."""
        with self._lock:
            ids = self._numbers.get(namespace, {})
            named = frozenset(name for name in ids if name is not None)
            return (None if None in ids else named), self.count

    def confirm(self, namespace: str, number: int) -> None:
        """Drop the forgets of a namespace up to this number: the service has confirmed them."""
        with self._lock:
            ids = self._numbers.get(namespace, {})
            left = {name: last for name, last in ids.items() if last > number}
            if left:
                self._numbers[namespace] = left
            else:
                self._numbers.pop(namespace, None)
