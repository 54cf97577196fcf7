"""What a remote store needs from the service that holds its bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ragcachekit.types import KVKey


@dataclass(frozen=True)
class Saved:
    """What became of an entry: whether it is there now, and how many had to leave for it."""

    kept: bool
    evicted: int = 0


class Usage(NamedTuple):
    """Entries and their bytes."""

    entries: int
    nbytes: int


Writes = frozenset[tuple[str, str]]
"""Writes under way: what each is called, and the name it is for."""


class NotHeard(Exception):
    """What could be forgotten is gone, but a writer elsewhere may still bring it back: tell again later.

    Attributes
    ----------
    awaits : frozenset
        The writes that were told, and have to end. Empty if nobody could be told.
    """

    def __init__(self, awaits: Writes = frozenset()) -> None:
        super().__init__(f"{len(awaits)} writes under way" if awaits else "not heard")
        self.awaits = awaits


class Left(Exception):
    """Not all could be deleted; what could be is gone."""


class Backend(Protocol):
    """Named byte strings within a byte budget, least recently used first out. Implementations promise:

    - methods may block and may raise anything: they are called under a guard, from several threads, and
      may go on after the caller has given up;
    - a name holds all of what was saved under it, or something that its seal exposes, or nothing;
    - an entry saved late never survives a ``forget`` that was called after its ``save``, or that one
      raises.

    Attributes
    ----------
    hears : bool
        Whether it is worth telling again what raised :class:`NotHeard`.
    """

    @property
    def hears(self) -> bool: ...

    def load(self, key: KVKey) -> bytes | None:
        """What is saved under ``key``, now the most recently used entry, or None."""
        ...

    def save(self, key: KVKey, blob: memoryview, wanted: Callable[[], bool]) -> Saved:
        """Keep ``blob`` under ``key``, as long as ``wanted`` says that nobody forgot it meanwhile."""
        ...

    def delete(self, key: KVKey) -> None:
        """Drop what is saved under ``key``."""
        ...

    def exists(self, key: KVKey) -> bool:
        """Whether something is saved under ``key``."""
        ...

    def forget(
        self,
        namespace: str,
        chunk_ids: frozenset[str] | None,
        dropped: set[str],
        awaits: Writes = frozenset(),
    ) -> None:
        """As :meth:`~ragcachekit.store.base.KVStore.forget`; digests of what went are added to ``dropped``.

        One after the other, so that they are known even if it fails half-way. One that cannot be deleted
        does not keep the others: :class:`Left` at the end. ``awaits`` is what the last telling of the same
        forget raised :class:`NotHeard` with.
        """
        ...

    def usage(self) -> Usage:
        """What is there now."""
        ...

    def close(self) -> None:
        """Let go of connections; does not wait."""
        ...


def hashed(text: str) -> str:
    """A name of fixed length and plain letters for any text (a namespace, a chunk id)."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]
