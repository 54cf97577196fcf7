"""What the memory tiers have in common: entries by reference, ranked by an eviction policy."""

from __future__ import annotations

import copy
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from threading import RLock
from typing import TypedDict

from ragcachekit.forks import refuse_after_fork
from ragcachekit.model.kv import ChunkKV
from ragcachekit.store.base import Evicted, Found, LayerSource, StoreStats, concerns, quota_of
from ragcachekit.store.counters import Counters
from ragcachekit.store.eviction.base import HIT, Access, EvictionPolicy
from ragcachekit.store.eviction.lru import Lru
from ragcachekit.store.eviction.ranking import Ranking
from ragcachekit.store.memory.own_memory import in_own_memory
from ragcachekit.types import KVKey

Cost = Callable[[ChunkKV], float]
"""Seconds that computing an entry takes, in any one unit; 0 where that is unknown."""


class MemoryOptions(TypedDict, total=False):
    """What every memory tier can be given beside its budget.

    Parameters
    ----------
    policy : EvictionPolicy, optional
        This tier's own; default least recently used.
    quotas : mapping of str to int
        Bytes that single namespaces may take (``*``: every other one).
    cost : callable
        What cost-aware policies weigh; default the number of tokens.
    """

    policy: EvictionPolicy | None
    quotas: Mapping[str, int] | None
    cost: Cost


class MemoryStore:
    """Chunk KV in memory, kept by reference where that is all its memory (and never written to).

    What ``get`` returned is in use until the caller drops it: evicting it would free no byte, so it stays,
    and stays counted. A put that would need such bytes is refused. What counts is the memory that an entry
    keeps alive; views of much more memory than the entry are copied.

    Parameters
    ----------
    tier : str
        Its name in reports.
    budget : int
        Bytes that all keys and values may take together; > 0.
    policy, quotas, cost
        As in :class:`MemoryOptions`.
    """

    shared = False
    remote = False

    def __init__(
        self,
        tier: str,
        budget: int,
        *,
        policy: EvictionPolicy | None = None,
        quotas: Mapping[str, int] | None = None,
        cost: Cost = lambda kv: float(kv.tokens),
    ) -> None:
        if budget <= 0:
            raise ValueError(
                f"the {tier} tier's budget must be > 0 bytes, got {budget}; leave the tier out instead"
            )
        self._tier = tier
        self._budget = budget
        self._quotas = dict(quotas or {})
        self._cost = cost
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

    def open(self, key: KVKey, weight: float = 1.0) -> Found | LayerSource | None:
        """As :meth:`get`: nothing is left to be read."""
        return self.get(key, weight)

    def put(self, key: KVKey, kv: ChunkKV) -> bool:
        """Keep ``kv``, evicting the lowest entries; False if it would not fit even so."""
        return self.admit(key, kv)[0]

    def admit(self, key: KVKey, kv: ChunkKV) -> tuple[bool, Evicted]:
        """As :meth:`put`, with the entries that it evicted."""
        with self._lock:
            if self._closed or not self._may_fit(key, self._least(kv)):
                return False, ()
        kv, nbytes = self._placed(kv)
        with self._lock:
            if self._closed or not self._may_fit(key, nbytes):
                return False, ()
            self._let_go(key)
            self._entries[key] = kv
            access = Access(False, self._cost(kv), kv.tokens)
            # Ranked before others are evicted: it starts from the clock at its put (RAGCache, Algorithm 1).
            self._ranking.add(key, nbytes, kv.tokens, key.namespace, access)
            return True, self._make_room(key)

    def __contains__(self, key: KVKey) -> bool:
        with self._lock:
            return key in self._entries

    def discard(self, key: KVKey) -> None:
        """Drop the entry under ``key``, which nobody could use, and count it as damaged."""
        with self._lock:
            if key in self._entries:
                self._remove(key)
                self._counters.count("damaged")

    def keys(self) -> Iterator[KVKey]:
        """Keys of what is here, those that came last first."""
        with self._lock:
            return reversed(list(self._entries))

    def evict(self, key: KVKey) -> None:
        """Drop the entry under ``key`` and count an eviction."""
        with self._lock:
            if key in self._entries:
                self._remove(key)
                self._counters.count("evictions")

    def drop(self, namespace: str, chunk_ids: frozenset[str] | None = None) -> frozenset[str]:
        """As :meth:`forget`, returning the digests of the dropped keys."""
        with self._lock:
            doomed = [key for key in self._entries if concerns(key, namespace, chunk_ids)]
            for key in doomed:
                self._remove(key)
        return frozenset(key.digest() for key in doomed)

    def forget(self, namespace: str, chunk_ids: frozenset[str] | None = None) -> int:
        """Drop the namespace's entries that hold, or were encoded behind, one of ``chunk_ids``."""
        return len(self.drop(namespace, chunk_ids))

    def stats(self) -> tuple[StoreStats, ...]:
        """One record."""
        with self._lock:
            entries, nbytes = len(self._entries), self._ranking.nbytes
        return (self._counters.stats(entries=entries, nbytes=nbytes, budget=self._budget),)

    def close(self) -> None:
        """Let go of all entries; further calls are misses."""
        with self._lock:
            self._closed = True
            for table in (self._entries, self._ranking, self._lent, self._returned):
                table.clear()

    def _remove(self, key: KVKey) -> None:
        self._let_go(key)
        del self._entries[key]
        self._ranking.remove(key)

    def _placed(self, kv: ChunkKV) -> tuple[ChunkKV, int]:
        """The KV as this tier holds it, and its bytes."""
        return in_own_memory(kv)

    def _least(self, kv: ChunkKV) -> int:
        """Bytes that the entry will take at least: what cannot fit is not placed for nothing."""
        return kv.nbytes

    # -- room --------------------------------------------------------------------------------------

    def _may_fit(self, key: KVKey, nbytes: int) -> bool:
        """Whether it would fit if all but what is in use were evicted."""
        self._take_back()
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
        """Evict until all is within its limits; the entry under ``key`` does not evict itself."""
        evicted: list[tuple[KVKey, ChunkKV]] = []
        space, quota = key.namespace, quota_of(self._quotas, key.namespace)
        self._ranking.hold(key)
        while quota is not None and self._ranking.nbytes_of(space) > quota:
            evicted += self._evict(space)
        while self._ranking.nbytes > self._budget:
            evicted += self._evict()
        self._ranking.release(key)
        return evicted

    def _evict(self, namespace: str | None = None) -> list[tuple[KVKey, ChunkKV]]:
        victim = self._ranking.evict(namespace)
        assert victim is not None, "_may_fit counted what can leave"
        self._counters.count("evictions")
        return [(victim, self._entries.pop(victim))]

    # -- what callers hold -------------------------------------------------------------------------

    def _lend(self, key: KVKey, kv: ChunkKV) -> ChunkKV:
        """A view of the entry whose life says how long it is in use."""
        self._take_back()
        known = self._lent.get(key)
        view = known() if known is not None else None
        if view is None:
            if known is not None:
                self._let_go(key)
            view = copy.copy(kv)  # shares the tensors
            # The callback may come in the middle of anything, so it only leaves a note.
            self._lent[key] = weakref.ref(view, lambda ref: self._returned.append((key, ref)))
            self._ranking.hold(key)
        return view

    def _take_back(self) -> None:
        """Release what nobody holds any more."""
        while self._returned:
            key, ref = self._returned.popleft()
            if self._lent.get(key) is ref:
                self._let_go(key)

    def _let_go(self, key: KVKey) -> None:
        if self._lent.pop(key, None) is not None:
            self._ranking.release(key)
