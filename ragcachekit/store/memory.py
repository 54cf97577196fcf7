"""The memory tiers: entries by reference, ranked by an eviction policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from threading import RLock
from typing import Any

import torch

from ragcachekit.model.kv import ChunkKV
from ragcachekit.store.base import Evicted, Found, KVStore, StoreStats, concerns, quota_of
from ragcachekit.store.eviction import HIT, Access, Counters, EvictionPolicy, Lru, Ranking
from ragcachekit.types import KVKey

_WASTE = 8
"""An entry is copied if it keeps more than 1/8 of its bytes alive beside them."""


def in_own_memory(kv: ChunkKV) -> tuple[ChunkKV, int]:
    """``kv``, copied if it keeps much more memory alive than it uses, and its bytes of memory."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in _tensors(kv)}
    held = sum(storages.values())
    if held <= kv.nbytes + kv.nbytes // _WASTE:
        return kv, max(kv.nbytes, held)
    copied = [t.clone(memory_format=torch.contiguous_format) for t in _tensors(kv)]
    layers = kv.layers
    sums = dict(zip(kv.sums, copied[2 * layers :], strict=True))
    kv = replace(kv, keys=tuple(copied[:layers]), values=tuple(copied[layers : 2 * layers]), sums=sums)
    return kv, kv.nbytes


def _tensors(kv: ChunkKV) -> tuple[torch.Tensor, ...]:
    return *kv.keys, *kv.values, *kv.sums.values()


Cost = Callable[[ChunkKV], float]
"""Cost of computing an entry, in any unit; 0 if unknown."""


class MemoryStore(KVStore):
    """Chunk KV in memory, by reference. Views of much more memory than the entry are copied.

    ``budget`` limits the bytes that all entries together keep alive, ``quotas`` those of single namespaces
    (``*``: every other one). The eviction ``policy`` is this tier's own, by default least recently used;
    ``cost`` of an entry is by default its number of tokens. An entry that is evicted while a prompt is being
    linked with it is freed after that.
    """

    def __init__(
        self,
        tier: str,
        budget: int,
        *,
        policy: EvictionPolicy | None = None,
        quotas: Mapping[str, int] | None = None,
        cost: Cost | None = None,
    ) -> None:
        self._tier = tier
        self._budget = budget
        self._quotas = dict(quotas or {})
        self._cost = cost or (lambda kv: float(kv.tokens))
        self._entries: dict[KVKey, ChunkKV] = {}
        self._ranking: Ranking[KVKey] = Ranking(policy or Lru())
        self._closed = False
        self._lock = RLock()
        self._counters = Counters(tier)

    def get(self, key: KVKey, weight: float = 1.0) -> Found | None:
        """The entry under ``key``, or None."""
        with self._lock:
            kv = self._entries.get(key)
            if weight:
                self._counters.count("misses" if kv is None else "hits")
                self._ranking.touch(key, HIT if weight == 1 else Access(weight=weight))
        return None if kv is None else Found(kv, self._tier)

    def admit(self, key: KVKey, kv: ChunkKV) -> tuple[bool, Evicted]:
        """Keep ``kv``, evicting the lowest-ranked entries; False if it cannot fit."""
        if not self._may_fit(key, kv.nbytes):
            return False, ()
        kv, nbytes = self._placed(kv)
        if not self._may_fit(key, nbytes):
            return False, ()
        with self._lock:
            if self._closed:
                return False, ()
            self._entries[key] = kv
            access = Access(False, self._cost(kv), kv.tokens)
            # Ranked before others are evicted: it starts from the clock at its put (RAGCache, Algorithm 1).
            self._ranking.add(key, nbytes, key.namespace, access, hold=True)
            evicted = self._make_room(key.namespace)
            self._ranking.release(key)
            return True, evicted

    def __contains__(self, key: KVKey) -> bool:
        with self._lock:
            return key in self._entries

    def in_memory(self, key: KVKey) -> bool:
        return key in self

    def retain(self, key: KVKey, seconds: float) -> None:
        with self._lock:
            self._ranking.retain(key, seconds)

    def discard(self, key: KVKey, *, damaged: bool = True) -> None:
        self._remove(key, "damaged" if damaged else "evictions")

    def keys(self, *, in_memory: bool = False) -> Iterator[KVKey]:
        """Keys of all entries, the last put first."""
        with self._lock:
            return reversed(list(self._entries))

    def drop(self, namespace: str, chunk_ids: frozenset[str] | None = None) -> frozenset[str]:
        with self._lock:
            doomed = [key for key in self._entries if concerns(key, namespace, chunk_ids)]
            for key in doomed:
                self._remove(key)
        return frozenset(key.digest() for key in doomed)

    def stats(self) -> tuple[StoreStats, ...]:
        with self._lock:
            entries, nbytes = len(self._entries), self._ranking.nbytes
        return (self._counters.stats(entries=entries, nbytes=nbytes, budget=self._budget),)

    def close(self) -> None:
        """Drop all entries; further calls are misses."""
        with self._lock:
            self._closed = True
            self._entries.clear()
            self._ranking.clear()

    def _remove(self, key: KVKey, event: str = "") -> None:
        with self._lock:
            if self._entries.pop(key, None) is not None:
                self._ranking.remove(key)
                if event:
                    self._counters.count(event)

    def _placed(self, kv: ChunkKV) -> tuple[ChunkKV, int]:
        return in_own_memory(kv)

    def _may_fit(self, key: KVKey, nbytes: int) -> bool:
        """Whether an entry is no larger than the budget and its namespace's quota."""
        limit = min(self._budget, quota_of(self._quotas, key.namespace) or self._budget)
        if nbytes > limit:
            self._counters.count("failed_writes")
            self._counters.warn_once("large", "entry of %d bytes exceeds the limit %d", nbytes, limit)
        return nbytes <= limit

    def _make_room(self, namespace: str) -> list[tuple[KVKey, ChunkKV]]:
        """Evict until quota and budget hold."""
        evicted: list[tuple[KVKey, ChunkKV]] = []
        quota = quota_of(self._quotas, namespace)
        while True:
            over_quota = quota is not None and self._ranking.nbytes_of(namespace) > quota
            if not over_quota and self._ranking.nbytes <= self._budget:
                return evicted
            victim = self._ranking.evict(namespace if over_quota else None)
            assert victim is not None, "the new entry alone fits"
            self._counters.count("evictions")
            evicted.append((victim, self._entries.pop(victim)))


class GpuStore(MemoryStore):
    """Chunk KV in the memory of the model's ``device``; ``options`` are those of :class:`MemoryStore`."""

    def __init__(self, budget: int, device: str | torch.device = "cuda", **options: Any) -> None:
        super().__init__("gpu", budget, **options)
        self._device = torch.device(device)

    def admit(self, key: KVKey, kv: ChunkKV) -> tuple[bool, Evicted]:
        """As :meth:`put`, with the evicted entries; False if the device has no memory for it."""
        try:
            return super().admit(key, kv)
        except torch.OutOfMemoryError as error:
            self._counters.count("failed_writes")
            self._counters.warn_once("memory", "no room on %s: %s", self._device, error)
            return False, ()

    def _placed(self, kv: ChunkKV) -> tuple[ChunkKV, int]:
        kv = kv.to(self._device)
        if not all(tensor.is_contiguous() for tensor in (*kv.keys, *kv.values)):
            kv = kv.each(torch.Tensor.contiguous)
        return in_own_memory(kv)


class HostStore(MemoryStore):
    """Chunk KV in main memory; ``options`` are those of :class:`MemoryStore`.

    ``pinned`` page-locks the tensors if there is CUDA, so that a GPU can copy them without waiting, for a
    copy at every put; each counts with the power of two that torch allocates for it. Without it, page-locked
    tensors are copied to ordinary memory.
    """

    def __init__(self, budget: int, *, pinned: bool = False, **options: Any) -> None:
        super().__init__("host", budget, **options)
        self._pinned = pinned and torch.cuda.is_available()

    def _placed(self, kv: ChunkKV) -> tuple[ChunkKV, int]:
        kv = kv.to("cpu")
        if self._pinned:
            try:
                kv = kv.each(lambda tensor: torch.empty_like(tensor, pin_memory=True).copy_(tensor))
                locked = sum(1 << (t.nbytes - 1).bit_length() for t in (*kv.keys, *kv.values) if t.nbytes)
                return kv, locked + sum(tensor.nbytes for tensor in kv.sums.values())
            except RuntimeError as error:  # the system limits how much may be page-locked
                self._counters.warn_once("pin", "cannot page-lock, going on without: %s", error)
                self._pinned = False
        begun = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        if begun and kv.keys[0].is_pinned():
            kv = kv.each(torch.Tensor.clone)
        return in_own_memory(kv)
