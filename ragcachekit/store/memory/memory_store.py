"""The common part of the memory tiers: entries by reference, ranked by an eviction policy."""

from __future__ import annotations

import copy
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from threading import RLock
from typing import TypedDict

from ragcachekit.forks import refuse_after_fork
from ragcachekit.model.kv import ChunkKV
from ragcachekit.store.base import Evicted, Found, StoreStats, Tier, concerns, quota_of
from ragcachekit.store.counters import Counters
from ragcachekit.store.eviction.base import HIT, Access, EvictionPolicy
from ragcachekit.store.eviction.policies import Lru
from ragcachekit.store.eviction.ranking import Ranking
from ragcachekit.store.memory.own_memory import in_own_memory
from ragcachekit.types import KVKey

Cost = Callable[[ChunkKV], float]
"""Cost of computing an entry, in any unit; 0 if unknown."""


class MemoryOptions(TypedDict, total=False):
    """Options of every memory tier, as in :class:`MemoryStore`."""

    policy: EvictionPolicy | None
    quotas: Mapping[str, int] | None
    cost: Cost | None


class MemoryStore(Tier):
    """Chunk KV in memory, by reference. Views of much more memory than the entry are copied.

    An entry that ``get`` returned is not evicted until the caller drops it, as that would free no memory. A
    put that would need its bytes is refused.

    Parameters
    ----------
    tier : str
        Its name in reports.
    budget : int
        Bytes of memory that all entries together keep alive; > 0.
    policy : EvictionPolicy, optional
        This tier's own; default least recently used.
    quotas : mapping of str to int
        Bytes that single namespaces may take (``*``: every other one).
    cost : callable, optional
        Cost of an entry for cost-aware policies; default its number of tokens.
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
        self._ranking: Ranking[KVKey] = Ranking(policy or Lru(), groups=bool(self._quotas))
        self._lent: dict[KVKey, weakref.ref[ChunkKV]] = {}
        self._returned: deque[tuple[KVKey, weakref.ref[ChunkKV]]] = deque()
        self._closed = False
        self._lock = RLock()
        self._counters = Counters(tier)
        refuse_after_fork(self)

    def get(self, key: KVKey, weight: float = 1.0) -> Found | None:
        """The entry under ``key``, or None."""
        with self._lock:
            kv = self._entries.get(key)
            if weight:
                self._counters.count("misses" if kv is None else "hits")
            if kv is None:
                return None
            view = self._lend(key, kv)
            if weight:
                self._ranking.touch(key, HIT if weight == 1 else Access(weight=weight))
            return Found(view, self._tier)

    def admit(self, key: KVKey, kv: ChunkKV) -> tuple[bool, Evicted]:
        """Keep ``kv``, evicting the lowest-ranked entries; False if it cannot fit."""
        with self._lock:
            if self._closed or not self._may_fit(key, self._least(kv)):
                return False, ()
        kv, nbytes = self._placed(kv)
        with self._lock:
            if self._closed or not self._may_fit(key, nbytes):
                return False, ()
            self._release(key)
            self._entries[key] = kv
            access = Access(False, self._cost(kv), kv.tokens)
            # Ranked before others are evicted: it starts from the clock at its put (RAGCache, Algorithm 1).
            self._ranking.add(key, nbytes, key.namespace, access, hold=True)
            return True, self._make_room(key)

    def __contains__(self, key: KVKey) -> bool:
        with self._lock:
            return key in self._entries

    def in_memory(self, key: KVKey) -> bool:
        return key in self

    def discard(self, key: KVKey) -> None:
        """Drop an unusable entry and count it as damaged."""
        with self._lock:
            if key in self._entries:
                self._remove(key)
                self._counters.count("damaged")

    def keys(self) -> Iterator[KVKey]:
        """Keys of all entries, the last put first."""
        with self._lock:
            return reversed(list(self._entries))

    def memory_keys(self) -> Iterator[KVKey]:
        return self.keys()

    def evict(self, key: KVKey) -> None:
        """Drop the entry under ``key`` and count an eviction."""
        with self._lock:
            if key in self._entries:
                self._remove(key)
                self._counters.count("evictions")

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
            for table in (self._entries, self._ranking, self._lent, self._returned):
                table.clear()

    def _remove(self, key: KVKey) -> None:
        self._release(key)
        del self._entries[key]
        self._ranking.remove(key)

    def _placed(self, kv: ChunkKV) -> tuple[ChunkKV, int]:
        """The KV in this tier's memory, and its bytes."""
        return in_own_memory(kv)

    def _least(self, kv: ChunkKV) -> int:
        """Bytes that the entry takes at least, known before it is copied."""
        return kv.nbytes

    # -- room --------------------------------------------------------------------------------------

    def _may_fit(self, key: KVKey, nbytes: int) -> bool:
        """Whether it would fit if all entries not in use were evicted."""
        self._release_unused()
        quota = quota_of(self._quotas, key.namespace)
        held = {k: self._ranking.size(k) for k in self._lent if k != key}
        own = sum(size for k, size in held.items() if k.namespace == key.namespace)
        for what, limit, kept in (("budget", self._budget, sum(held.values())), ("quota", quota, own)):
            if limit is not None and kept + nbytes > limit:
                self._counters.count("failed_writes")
                why = "entry of %d bytes does not fit into the %s of %d beside the %d in use"
                self._counters.warn_once(what, why, nbytes, what, limit, kept)
                return False
        return True

    def _make_room(self, key: KVKey) -> list[tuple[KVKey, ChunkKV]]:
        """Evict until quota and budget hold; not the entry under ``key``, which is released."""
        evicted: list[tuple[KVKey, ChunkKV]] = []
        namespace, quota = key.namespace, quota_of(self._quotas, key.namespace)
        while quota is not None and self._ranking.nbytes_of(namespace) > quota:
            evicted += self._evict(namespace)
        while self._ranking.nbytes > self._budget:
            evicted += self._evict()
        self._ranking.release(key)
        return evicted

    def _evict(self, namespace: str | None = None) -> list[tuple[KVKey, ChunkKV]]:
        victim = self._ranking.evict(namespace)
        assert victim is not None, "_may_fit counted the evictable entries"
        self._counters.count("evictions")
        return [(victim, self._entries.pop(victim))]

    # -- entries in use ----------------------------------------------------------------------------

    def _lend(self, key: KVKey, kv: ChunkKV) -> ChunkKV:
        """A view of the entry; it is in use as long as the view lives."""
        self._release_unused()
        known = self._lent.get(key)
        view = known() if known is not None else None
        if view is None:
            self._release(key)
            view = copy.copy(kv)  # shares the tensors
            # The callback may run at any moment, so it only appends.
            self._lent[key] = weakref.ref(view, lambda ref: self._returned.append((key, ref)))
            self._ranking.hold(key)
        return view

    def _release_unused(self) -> None:
        """Release the entries whose views are gone."""
        while self._returned:
            key, ref = self._returned.popleft()
            if self._lent.get(key) is ref:
                self._release(key)

    def _release(self, key: KVKey) -> None:
        if self._lent.pop(key, None) is not None:
            self._ranking.release(key)
