"""The contract of every storage tier."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from ragcachekit.model.kv import ChunkKV
from ragcachekit.types import KVKey


@dataclass(frozen=True)
class Found:
    """A hit: the KV and the tier that held it (``host``, ``disk``)."""

    kv: ChunkKV
    tier: str


@dataclass(frozen=True)
class StoreStats:
    """Counters of one tier since it was opened; ``nbytes`` and ``entries`` are the present content.

    ``damaged`` counts entries that failed verification and were dropped; ``failed_writes`` counts
    puts that could not be kept (no space, larger than the budget, I/O error).
    """

    tier: str
    entries: int
    nbytes: int
    budget: int
    hits: int
    misses: int
    evictions: int
    damaged: int
    failed_writes: int


@runtime_checkable
class KVStore(Protocol):
    """Where chunk KV lives. Implementations promise:

    - ``get`` returns exactly what was ``put`` under an equal key, byte for byte, or None. Never
      another key's entry, never a damaged one: verification failure is a miss.
    - Nothing raises for a full or failing medium once the store is open: a ``put`` that cannot be
      kept returns False and leaves older entries whole; ``get`` returns None.
    - Returned tensors are shared and must not be written to.
    - All methods are thread safe.
    - ``nbytes`` never exceeds the budget after a call returns; a new entry never evicts itself
      (one larger than the whole budget is not kept).
    """

    def get(self, key: KVKey) -> Found | None:
        """The entry under ``key``, or None."""
        ...

    def put(self, key: KVKey, kv: ChunkKV) -> bool:
        """Keep ``kv`` under ``key``; True if it can now be read back. Idempotent."""
        ...

    def __contains__(self, key: KVKey) -> bool:
        """Whether ``get`` would probably hit; reads no tensor and counts no access."""
        ...

    def forget(self, namespace: str, chunk_ids: frozenset[str] | None = None) -> int:
        """Drop entries of the namespace whose chunk id, or any context id, is among ``chunk_ids``.

        ``None`` drops the whole namespace. Returns the number of entries dropped.
        """
        ...

    def stats(self) -> tuple[StoreStats, ...]:
        """One record per tier."""
        ...

    def close(self) -> None:
        """Release files and threads; further calls are misses."""
        ...


def concerns(key: KVKey, namespace: str, chunk_ids: frozenset[str] | None) -> bool:
    """Whether ``forget(namespace, chunk_ids)`` is about ``key``.

    Contextual KV holds traces of the chunks it was encoded behind, so those ids count as well.
    """
    if key.namespace != namespace:
        return False
    return chunk_ids is None or not chunk_ids.isdisjoint((key.chunk_id, *key.context))
