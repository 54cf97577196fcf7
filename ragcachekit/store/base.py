"""The contract of every storage tier."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import torch

from ragcachekit.errors import StoreError
from ragcachekit.model.kv import ChunkKV, TensorShape
from ragcachekit.reports import Report
from ragcachekit.types import KVKey, whole_id


@dataclass(frozen=True)
class Found:
    """A hit: the KV and the tier that held it (``gpu``, ``host``, ``disk``, ``redis``, ``bulk``)."""

    kv: ChunkKV
    tier: str


Pair = tuple[torch.Tensor, torch.Tensor]
"""Keys and values of one layer."""

Evicted = Sequence[tuple[KVKey, ChunkKV]]
"""Entries that a tier evicted."""


@dataclass(frozen=True, eq=False)
class LayerSource:
    """A hit whose header is verified and whose layers are to be read one by one, by one thread at a time.

    - ``nbytes``: To be read.
    - ``shapes``: Per layer the dtype and shape of keys and of values, as ``layer`` returns them.
    - ``layer``: Called with 0, 1, and so on; returns verified keys and values. Raises EntryDamaged if a byte
      was altered (the entry has then been dropped) and OSError if it cannot be read.
    - ``finished``: Called when all layers were read: counts the hit; faster tiers may keep the KV.
    - ``close``: Closes files; allowed at any time, may be repeated. The opener calls it.
    - ``start``, ``sums``, ``quantised``: As in :class:`ragcachekit.model.kv.ChunkKV`.
    """

    tier: str
    nbytes: int
    shapes: tuple[tuple[TensorShape, TensorShape], ...]
    layer: Callable[[int], Pair]
    finished: Callable[[ChunkKV], object]
    close: Callable[[], object]
    start: int | None = None
    sums: Mapping[str, torch.Tensor] = field(default_factory=dict)
    quantised: str = ""

    @property
    def layers(self) -> int:
        return len(self.shapes)

    @property
    def tokens(self) -> int:
        return self.shapes[0][0][1][1]


@dataclass(frozen=True)
class StoreStats(Report):
    """Counters of one tier since it was opened; ``nbytes`` and ``entries`` are the present content.

    ``damaged`` entries failed verification or have another shape than the model's, and were dropped.
    ``failed_writes`` counts refused puts (no space, larger than the budget, I/O error). ``writable`` is False
    after the medium refused a write, until it takes one. ``failures`` counts what raised or did not come in
    time: operations of remote tiers and of a store of your own, and loads of entries.
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
    failures: int = 0


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

    Stores of several tiers ask three more things of each: ``shared`` is True if other processes use the
    medium, ``remote`` if a service may be slow, and :meth:`admit` and :meth:`drop` return more than
    :meth:`put` and :meth:`forget`.
    """

    shared = False
    remote = False

    def get(self, key: KVKey, weight: float = 1.0) -> Found | None:
        """The entry under ``key``, or None; a store has this method or :meth:`open`.

        ``weight`` is for eviction policies that weigh uses; 0 counts no use (a prefetch).
        """
        opened = self.open(key, weight)
        if not isinstance(opened, LayerSource):
            return opened
        try:
            keys, values = zip(*map(opened.layer, range(opened.layers)), strict=True)
        except (StoreError, OSError):
            return None
        finally:
            opened.close()
        kv = ChunkKV.checked(keys, values, opened.start, opened.sums, opened.quantised)
        opened.finished(kv)
        return Found(kv, opened.tier)

    def open(self, key: KVKey, weight: float = 1.0) -> Found | LayerSource | None:
        """As :meth:`get`, without waiting for layers that have to be read; by default it is :meth:`get`."""
        if type(self).get is KVStore.get:
            raise NotImplementedError(f"{type(self).__name__} has neither get nor open")
        return self.get(key, weight)

    def sums(self, key: KVKey) -> Mapping[str, torch.Tensor] | None:
        """What was recorded with an entry, None if it is not there; reads no layer and counts no use."""
        opened = self.open(key, 0.0)
        if isinstance(opened, LayerSource):
            opened.close()
            return opened.sums
        return None if opened is None else opened.kv.sums

    def put(self, key: KVKey, kv: ChunkKV) -> bool:
        """Store ``kv`` under ``key``; True if it can now be read back. Idempotent."""
        return self.admit(key, kv)[0]

    def admit(self, key: KVKey, kv: ChunkKV) -> tuple[bool, Evicted]:
        """As :meth:`put`, returning also evicted entries that a slower tier may keep."""
        return self.put(key, kv), ()

    def retain(self, key: KVKey, seconds: float) -> None:
        """Rather evict other entries until this one was not used for so many seconds; by default nothing."""

    def __contains__(self, key: KVKey) -> bool:
        """Whether ``get`` would probably hit; reads no tensor and counts no access."""
        raise NotImplementedError

    def in_memory(self, key: KVKey) -> bool:
        """Whether ``get`` would find the entry without any I/O; counts no access. By default it would not."""
        return False

    def discard(self, key: KVKey, *, damaged: bool = True) -> None:
        """Drop the entry under ``key``, if there is one, and count it as damaged or else as evicted.

        By default nothing. Remote tiers drop damaged entries alone.
        """

    def keys(self, *, in_memory: bool = False) -> Iterator[KVKey]:
        """Keys of all readable entries, or of those in memory, the latest first; by default none."""
        return iter(())

    def forget(self, namespace: str, chunk_ids: frozenset[str] | None = None) -> int:
        """Drop entries of the namespace whose chunk id, or any context id, is among ``chunk_ids``.

        ``None`` drops the whole namespace. Returns how many entries went. StoreError if some may be left.
        """
        return len(self.drop(namespace, chunk_ids))

    def drop(self, namespace: str, chunk_ids: frozenset[str] | None = None) -> frozenset[str]:
        """As :meth:`forget`, returning the digests of the dropped keys, which several tiers may have."""
        return frozenset()

    def stats(self) -> tuple[StoreStats, ...]:
        """One record per tier."""
        return ()

    def close(self) -> None:
        """Release files and threads; further calls are misses."""


def concerns(key: KVKey, namespace: str, chunk_ids: AbstractSet[str] | None) -> bool:
    """Whether ``forget(namespace, chunk_ids)`` drops ``key``; the ids of its context count as well."""
    if key.namespace != namespace:
        return False
    return chunk_ids is None or not chunk_ids.isdisjoint(map(whole_id, (key.chunk_id, *key.context)))


def quota_of(quotas: Mapping[str, int], namespace: str) -> int | None:
    """Bytes that a namespace may take: its own entry, else that of ``*``, else no limit."""
    return quotas.get(namespace, quotas.get("*"))


class NullStore(KVStore):
    """Keeps nothing: every ``get`` is a miss, and every ``put`` is refused."""

    def get(self, key: KVKey, weight: float = 1.0) -> Found | None:
        return None

    def put(self, key: KVKey, kv: ChunkKV) -> bool:
        return False

    def __contains__(self, key: KVKey) -> bool:
        return False
