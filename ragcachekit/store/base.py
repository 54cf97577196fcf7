"""The contract of every storage tier, its counters, and the store that keeps nothing."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from threading import Lock
from typing import Protocol, runtime_checkable

import torch

from ragcachekit.model.kv import ChunkKV
from ragcachekit.reports import Report
from ragcachekit.threads import refuse_after_fork
from ragcachekit.types import KVKey, whole_id


@dataclass(frozen=True)
class Found:
    """A hit: the KV and the tier that held it (``gpu``, ``host``, ``disk``, ``redis``, ``bulk``)."""

    kv: ChunkKV
    tier: str


Evicted = Sequence[tuple[KVKey, ChunkKV]]
"""Entries that a tier evicted."""


@runtime_checkable
class LayerSource(Protocol):
    """A hit whose header is verified and whose layers are to be read one by one, by one thread at a time.

    ``nbytes`` are to be read. ``start``, ``sums`` and ``quantised`` are as in
    :class:`ragcachekit.model.kv.ChunkKV`. ``shapes`` has per layer the dtype and shape of keys and of values,
    as :meth:`layer` returns them. The opener closes it.
    """

    tier: str
    nbytes: int
    tokens: int
    layers: int
    start: int | None
    sums: Mapping[str, torch.Tensor]
    quantised: str
    shapes: tuple[tuple[tuple[torch.dtype, tuple[int, ...]], tuple[torch.dtype, tuple[int, ...]]], ...]

    def layer(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Verified keys and values of the next layer (``number`` counts up from 0).

        Raises
        ------
        EntryDamaged
            If a byte was altered; the entry has been dropped.
        OSError
            If it cannot be read.
        """
        ...

    def finished(self, kv: ChunkKV) -> None:
        """Count the hit when all layers were read; faster tiers may keep ``kv``."""
        ...

    def close(self) -> None:
        """Close files; allowed at any time, may be repeated."""
        ...


class WrappedSource:
    """A :class:`LayerSource` that forwards to another one."""

    def __init__(self, source: LayerSource) -> None:
        self._source = source
        self.tier, self.nbytes = source.tier, source.nbytes
        self.tokens, self.layers, self.start = source.tokens, source.layers, source.start
        self.sums, self.quantised, self.shapes = source.sums, source.quantised, source.shapes

    def layer(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._source.layer(number)

    def finished(self, kv: ChunkKV) -> None:
        self._source.finished(kv)

    def close(self) -> None:
        self._source.close()


@dataclass(frozen=True)
class StoreStats(Report):
    """Counters of one tier since it was opened; ``nbytes`` and ``entries`` are the present content.

    ``damaged`` entries failed verification or have another shape than the model's, and were dropped.
    ``failed_writes`` counts refused puts (no space, larger than the budget, I/O error). ``writable`` is False
    while the medium can only be read.
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
    writable: bool = True


class KVStore:
    """A store of chunk KV, the base of every implementation. They promise:

    - ``get`` returns exactly what was ``put`` under an equal key, byte for byte, or None (a tier that
      quantises: the same rounded KV every time, marked as such). An entry that fails verification is a miss.
    - Nothing raises for a full or failing medium: a ``put`` that cannot be kept returns False, is not
      found afterwards and does not damage older entries; ``get`` returns None.
    - Returned tensors are shared and must not be written to.
    - All methods are thread safe.
    - ``nbytes`` never exceeds the budget after a call returns; a new entry never evicts itself
      (one larger than the budget, or than its namespace's quota, is not kept).
    - An entry is not evicted from memory while a caller holds what ``get`` returned.
    """

    def get(self, key: KVKey, weight: float = 1.0) -> Found | None:
        """The entry under ``key``, or None.

        ``weight`` is for eviction policies that weigh uses; 0 counts no use (a prefetch).
        """
        raise NotImplementedError

    def open(self, key: KVKey, weight: float = 1.0) -> Found | LayerSource | None:
        """As :meth:`get`, without waiting for layers that have to be read; by default it is :meth:`get`."""
        return self.get(key, weight)

    def sums(self, key: KVKey) -> Mapping[str, torch.Tensor] | None:
        """What was recorded with an entry, None if it is not there; reads no layer and counts no use."""
        opened = self.open(key, 0.0)
        if isinstance(opened, Found):
            return opened.kv.sums
        if opened is None:
            return None
        opened.close()
        return opened.sums

    def put(self, key: KVKey, kv: ChunkKV) -> bool:
        """Store ``kv`` under ``key``; True if it can now be read back. Idempotent."""
        raise NotImplementedError

    def __contains__(self, key: KVKey) -> bool:
        """Whether ``get`` would probably hit; reads no tensor and counts no access."""
        raise NotImplementedError

    def in_memory(self, key: KVKey) -> bool:
        """Whether ``get`` would find the entry without any I/O; counts no access. By default it would not."""
        return False

    def discard(self, key: KVKey) -> None:
        """Drop an unusable entry and count it as damaged; no error if there is none."""
        raise NotImplementedError

    def keys(self) -> Iterator[KVKey]:
        """Keys of all readable entries, the latest first; by default none are listed."""
        return iter(())

    def memory_keys(self) -> Iterator[KVKey]:
        """Keys of the entries that :meth:`in_memory` finds; by default none."""
        return iter(())

    def evict(self, key: KVKey) -> None:
        """Drop the entry under ``key``, if there is one, and count an eviction; by default nothing."""
        return

    def forget(self, namespace: str, chunk_ids: frozenset[str] | None = None) -> int:
        """Drop entries of the namespace whose chunk id, or any context id, is among ``chunk_ids``.

        ``None`` drops the whole namespace. Returns the number of dropped entries. Raises StoreError if some
        may be left.
        """
        raise NotImplementedError

    def stats(self) -> tuple[StoreStats, ...]:
        """One record per tier."""
        raise NotImplementedError

    def close(self) -> None:
        """Release files and threads; further calls are misses."""
        raise NotImplementedError


class Tier(KVStore):
    """A store on one medium: ``shared`` with other processes or not, ``remote`` if a service may be slow."""

    shared = False
    remote = False

    def put(self, key: KVKey, kv: ChunkKV) -> bool:
        return self.admit(key, kv)[0]

    def admit(self, key: KVKey, kv: ChunkKV) -> tuple[bool, Evicted]:
        """As :meth:`put`, returning also evicted entries that a slower tier may keep."""
        raise NotImplementedError

    def forget(self, namespace: str, chunk_ids: frozenset[str] | None = None) -> int:
        return len(self.drop(namespace, chunk_ids))

    def drop(self, namespace: str, chunk_ids: frozenset[str] | None = None) -> frozenset[str]:
        """As :meth:`forget`, returning the digests of the dropped keys, which several tiers may have."""
        raise NotImplementedError


def concerns(key: KVKey, namespace: str, chunk_ids: AbstractSet[str] | None) -> bool:
    """Whether ``forget(namespace, chunk_ids)`` drops ``key``; the ids of its context count as well."""
    if key.namespace != namespace:
        return False
    return chunk_ids is None or not chunk_ids.isdisjoint(map(whole_id, (key.chunk_id, *key.context)))


def quota_of(quotas: Mapping[str, int], namespace: str) -> int | None:
    """Bytes that a namespace may take: its own entry, else that of ``*``, else no limit."""
    return quotas.get(namespace, quotas.get("*"))


_log = logging.getLogger(__name__)


class Counters:
    """Thread-safe event counts of one tier, and a log of its failures."""

    def __init__(self, tier: str) -> None:
        self._tier = tier
        self._lock = Lock()
        self._warned: set[str] = set()
        refuse_after_fork(self)
        self._counts = {"hits": 0, "misses": 0, "evictions": 0, "damaged": 0, "failed_writes": 0}

    def count(self, event: str, by: int = 1) -> None:
        """Add to ``hits``, ``misses``, ``evictions``, ``damaged`` or ``failed_writes``."""
        with self._lock:
            self._counts[event] += by

    def warn_once(self, kind: str, message: str, *args: object) -> None:
        """Log a warning the first time, at debug level afterwards."""
        with self._lock:
            level = logging.DEBUG if kind in self._warned else logging.WARNING
            self._warned.add(kind)
        _log.log(level, f"%s tier: {message}", self._tier, *args)

    def stats(self, *, entries: int, nbytes: int, budget: int, writable: bool = True) -> StoreStats:
        """The counts together with the tier's present content."""
        with self._lock:
            return StoreStats(self._tier, entries, nbytes, budget, **self._counts, writable=writable)


class NullStore(KVStore):
    """Every ``get`` is a miss and every ``put`` is refused."""

    def __init__(self) -> None:
        self._counters = Counters("null")

    def get(self, key: KVKey, weight: float = 1.0) -> Found | None:
        self._counters.count("misses")
        return None

    def put(self, key: KVKey, kv: ChunkKV) -> bool:
        """Always False; not a failure, so not counted as one."""
        return False

    def __contains__(self, key: KVKey) -> bool:
        return False

    def discard(self, key: KVKey) -> None:
        return

    def forget(self, namespace: str, chunk_ids: frozenset[str] | None = None) -> int:
        return 0

    def stats(self) -> tuple[StoreStats, ...]:
        return (self._counters.stats(entries=0, nbytes=0, budget=0),)

    def close(self) -> None:
        return
