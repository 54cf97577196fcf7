"""The contract of the service that holds a remote store's bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import NamedTuple, Protocol

from ragcachekit.types import KVKey


class Usage(NamedTuple):
    """Entries and their bytes."""

    entries: int
    nbytes: int


class Backend(Protocol):
    """Named byte strings within a byte budget, least recently used first out.

    Methods may block and raise anything: they run with a deadline, in several threads, and may end after the
    caller has given up. Implementations promise:

    - an entry is whole, missing, or its seal does not match;
    - an entry saved late never survives a ``forget`` called after its ``save``, or that ``forget`` raises.
    """

    def open(self) -> None:
        """Evict what exceeds the budget."""
        ...

    def load(self, key: KVKey) -> bytes | None:
        """Return the entry under ``key``, now the most recently used one, or None."""
        ...

    def save(self, key: KVKey, blob: memoryview, wanted: Callable[[], bool]) -> int | None:
        """Keep ``blob`` under ``key`` if ``wanted()``: it was not forgotten meanwhile.

        Return how many entries were evicted for it, or None if it is not kept.
        """
        ...

    def delete(self, key: KVKey) -> None:
        """Drop the entry under ``key``."""
        ...

    def exists(self, key: KVKey) -> bool:
        """Whether there is an entry under ``key``."""
        ...

    def forget(self, namespace: str, chunk_ids: frozenset[str] | None, dropped: set[str]) -> None:
        """As :meth:`~ragcachekit.store.base.KVStore.forget`, adding digests to ``dropped``."""
        ...

    def usage(self) -> Usage:
        """Return the present content."""
        ...

    def close(self) -> None:
        """Close connections; does not wait."""
        ...


def hashed(text: str) -> str:
    """A name of 32 hexadecimal digits for a namespace or chunk id."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]
