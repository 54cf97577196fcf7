"""Forgets that a service may not have heard of yet, few of them however many there were."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock

from ragcachekit.store.base import concerns
from ragcachekit.store.process import PerProcess
from ragcachekit.store.remote_base import Writes
from ragcachekit.types import KVKey


@dataclass(eq=False)
class Forget:
    """One of them, or several of a namespace that nobody waits for any more.

    Attributes
    ----------
    namespace : str
    chunk_ids : set of str or None
        None for all of the namespace.
    dropped : set of str
        Digests of what went.
    done : bool
        Whether the service has heard of it.
    waiting : bool
        Whether its caller still waits to hear what became of it.
    telling : bool
        Whether the service hears of it just now.
    swept : bool
        Whether what was there has gone, although not all have heard of it.
    awaits : frozenset
        Writes that were told of it, and have to end.
    again : float
        Monotonic seconds before which operations that it is not about do not tell again.
    """

    namespace: str
    chunk_ids: set[str] | None
    dropped: set[str] = field(default_factory=set)
    done: bool = False
    waiting: bool = True
    telling: bool = False
    swept: bool = False
    awaits: Writes = frozenset()
    again: float = 0.0

    def concerns(self, key: KVKey) -> bool:
        """Whether it is about ``key``."""
        return concerns(key, self.namespace, self.chunk_ids)

    def add(self, other: Forget) -> None:
        """Stand for ``other`` too."""
        self.swept = self.swept and other.swept
        # If one of them has told nobody yet, both are told from the beginning.
        self.awaits = self.awaits | other.awaits if self.awaits and other.awaits else frozenset()
        self.again = min(self.again, other.again)
        if self.chunk_ids is None or other.chunk_ids is None:
            self.chunk_ids = None
        else:
            self.chunk_ids |= other.chunk_ids


class PendingForgets:
    """Thread safe. Per namespace at most two that nobody waits for: one being told, one that gathers."""

    def __init__(self) -> None:
        self._locks = PerProcess(Lock)
        self._of: dict[str, list[Forget]] = {}

    def __len__(self) -> int:
        """Namespaces that they are about."""
        return len(self._of)

    def concern(self, key: KVKey) -> bool:
        """Whether one of them is about ``key``."""
        with self._locks.get():
            pending = self._of.get(key.namespace, ())
            return any(forget.concerns(key) for forget in pending)

    def add(self, namespace: str, chunk_ids: frozenset[str] | None) -> Forget:
        """Remember a forget whose caller waits for it, until :meth:`leave`."""
        forget = Forget(namespace, None if chunk_ids is None else set(chunk_ids))
        with self._locks.get():
            self._of.setdefault(namespace, []).append(forget)
        return forget

    def leave(self, forget: Forget) -> None:
        """Its caller waits no longer: if it is not done, it becomes part of an earlier one."""
        with self._locks.get():
            forget.waiting = False
            pending = self._of.get(forget.namespace, [])
            left = [other for other in pending if not (other.waiting or other.telling)]
            for other in left[1:]:
                left[0].add(other)
                pending.remove(other)

    def all(self) -> list[Forget]:
        """The ones that there are now."""
        with self._locks.get():
            return [forget for pending in self._of.values() for forget in pending]

    @contextmanager
    def telling(self, forget: Forget) -> Iterator[frozenset[str] | None]:
        """While the service hears of it: the chunk ids, which do not grow meanwhile. Then it is done."""
        with self._locks.get():
            forget.telling = True
            chunk_ids = None if forget.chunk_ids is None else frozenset(forget.chunk_ids)
        try:
            yield chunk_ids
            forget.done = True
        finally:
            with self._locks.get():
                forget.telling = False
                if forget.done:
                    self._remove(forget)

    def _remove(self, forget: Forget) -> None:
        pending = self._of.get(forget.namespace, [])
        if forget in pending:  # not if it became part of another one since it was listed
            pending.remove(forget)
        if not pending:
            self._of.pop(forget.namespace, None)
