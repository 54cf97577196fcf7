"""The contract of the service that holds a remote store's bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ragcachekit.types import KVKey


@dataclass(frozen=True)
class Saved:
    """The outcome of a save: whether the entry is there now, and how many were evicted for it."""

    kept: bool
    evicted: int = 0


class Usage(NamedTuple):
    """Entries and their bytes."""

    entries: int
    nbytes: int


class Left(Exception):
    """Some entries could not be deleted; the others are gone."""


class Backend(Protocol):
    """Named byte strings within a byte budget, least recently used first out. Implementations promise:

    - methods may block and may raise anything: they run under a guard, in several threads, and may go on
      after the caller has given up;
    - a name holds all of what was saved under it, or something that its seal exposes, or nothing;
    - an entry saved late never survives a ``forget`` that was called after its ``save``, or that one
      raises.
    """

    def load(self, key: KVKey) -> bytes | None:
        """Return what is saved under ``key``, now the most recently used entry, or None."""
        ...

    def save(self, key: KVKey, blob: memoryview, wanted: Callable[[], bool]) -> Saved:
        """Keep ``blob`` under ``key``, unless ``wanted`` says that it was forgotten meanwhile."""
        ...

    def delete(self, key: KVKey) -> None:
        """Drop what is saved under ``key``."""
        ...

    def exists(self, key: KVKey) -> bool:
        """Whether something is saved under ``key``."""
        ...

    def forget(self, namespace: str, chunk_ids: frozenset[str] | None, dropped: set[str]) -> None:
        """As :meth:`~ragcachekit.store.base.KVStore.forget`, adding digests to ``dropped`` as entries go.

        Raises
        ------
        Left
            At the end, if some could not be deleted.
        """
        ...

    def usage(self) -> Usage:
        """Return what is there now."""
        ...

    def close(self) -> None:
        """Close connections; does not wait."""
        ...


def hashed(text: str) -> str:
    """A name of fixed length and plain letters for any text (a namespace, a chunk id)."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]
