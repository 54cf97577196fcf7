"""A tier on a service that may be slow, dead or hostile: sealed entries, deadlines, forgets that last."""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from threading import Event, Lock

from ragcachekit.forks import refuse_after_fork
from ragcachekit.model.kv import ChunkKV
from ragcachekit.store.base import Evicted, Found, LayerSource, StoreStats, quota_of
from ragcachekit.store.counters import Counters
from ragcachekit.store.entry.header import EntryDamaged
from ragcachekit.store.entry.image import from_bytes, to_bytes
from ragcachekit.store.entry.layout import storable
from ragcachekit.store.remote.base import Backend, Left, Saved, Usage
from ragcachekit.store.remote.deadlines import DeadlineExecutor, DeadlineStats
from ragcachekit.store.remote.pending_deletes import PendingDeletes
from ragcachekit.store.remote.seal import OtherKey, Seal
from ragcachekit.types import KVKey

PATIENCE = 10
"""Deadlines that ``forget`` and opening may take: no answer waits for them."""

_MOST_REMEMBERED = 10_000
AGAIN_SECONDS = 1.0
"""How long after a forget that failed operations try it again."""


class RemoteStore:
    """Sealed chunk KV on a :class:`~ragcachekit.store.remote.base.Backend`, behind a guard.

    A method returns within the guard's deadline (``forget``: ten of them), with a miss, False or nothing
    if the service does not answer. A forget that the service has not confirmed stays pending: this store
    neither reads nor writes such entries, and operations try the forget again, once a second at most.

    Parameters
    ----------
    tier : str
    backend : Backend
    seal : Seal
    guard : Guard
    budget : int
        Bytes that all sealed entries may take together; > 0.
    largest : int or None
        Bytes of the largest entry that this tier is for; a put of a larger one is False, no failure.
    quotas : mapping of str to int
        Bytes that single namespaces may take; ``*`` stands for every other one.
    """

    shared = True
    remote = True

    def __init__(
        self,
        tier: str,
        backend: Backend,
        seal: Seal,
        guard: DeadlineExecutor,
        budget: int,
        *,
        largest: int | None = None,
        quotas: Mapping[str, int] | None = None,
    ) -> None:
        self._tier, self._backend, self._seal, self._guard = tier, backend, seal, guard
        self._budget, self._largest, self._quotas = budget, largest, dict(quotas or {})
        self._counters = Counters(tier)
        self._closed = False
        self._pending = PendingDeletes()
        self._telling = Lock()
        self._dropping: list[str] = []  # namespaces of forgets under way, which count what they drop
        self._retry_at = 0.0  # monotonic seconds
        self._kept: dict[str, None] = {}  # digests of puts that were not refused
        # A store that is dropped without close leaves no connection open. Not at exit: that may hang.
        self._end = weakref.finalize(self, backend.close)
        self._end.atexit = False
        refuse_after_fork(self)

    def get(self, key: KVKey, weight: float = 1.0) -> Found | None:
        """The entry under ``key``, its seal verified, now the most recently used one, or None."""
        kv = None if self._closed else self._guard.look(lambda: self._load(key), None)
        if kv is None or self._pending.concern(key):  # forgotten while it was read
            self._counters.count("misses")
            return None
        self._counters.count("hits")
        return Found(kv, self._tier)

    def open(self, key: KVKey, weight: float = 1.0) -> Found | LayerSource | None:
        """As :meth:`get`: the seal is over the whole entry, so no layer can be used before the last."""
        return self.get(key, weight)

    def put(self, key: KVKey, kv: ChunkKV) -> bool:
        """Seal ``kv`` and keep it, evicting least recently used entries.

        False, with all other entries whole, if the entry is too large, the service does not answer in
        time (what arrives late is deleted again), or a forget of it is pending.

        Raises
        ------
        TypeError
            For KV of a dtype that safetensors does not know.
        """
        for tensor in (*kv.keys, *kv.values, *kv.sums.values()):
            storable(tensor.dtype)
        if self._closed:
            return False
        limit = min(self._budget, quota_of(self._quotas, key.namespace) or self._budget)
        if kv.nbytes > limit:
            self._counters.warn_once("large", "entry of %d bytes exceeds the limit %d", kv.nbytes, limit)
        elif self._largest is not None and kv.nbytes > self._largest:
            return False
        elif self._put(key, kv, limit):
            return True
        self._counters.count("failed_writes")
        return False

    def admit(self, key: KVKey, kv: ChunkKV) -> tuple[bool, Evicted]:
        """As :meth:`put`; evicted entries are not handed down."""
        return self.put(key, kv), ()

    def __contains__(self, key: KVKey) -> bool:
        return not self._closed and self._guard.look(
            lambda: self._settled(key) and self._backend.exists(key), False
        )

    def discard(self, key: KVKey) -> None:
        """Delete an entry that cannot be used, and count it as damaged."""
        if key in self:
            self._counters.count("damaged")
            self._guard.run(lambda: self._backend.delete(key), None)

    def drop(self, namespace: str, chunk_ids: frozenset[str] | None = None) -> frozenset[str]:
        """As :meth:`forget`, returning the digests of the dropped keys."""
        dropped: set[str] = set()
        if self._closed or (chunk_ids is not None and not chunk_ids):
            return frozenset()
        lookup_budget = PATIENCE * self._guard.deadline
        try:
            self._dropping.append(namespace)
            self._pending.add(namespace, chunk_ids)
            self._guard.run(lambda: self._forget(namespace, dropped, lookup_budget), None, lookup_budget)
        finally:
            with suppress(ValueError):  # interrupted before it was in there
                self._dropping.remove(namespace)
        if namespace in self._pending:
            self._counters.warn_once("pending", "a forget is pending; nothing of it is read by this process")
        return frozenset(dropped)

    def forget(self, namespace: str, chunk_ids: frozenset[str] | None = None) -> int:
        """Drop entries; returns how many went at once. The rest is pending (:attr:`pending_forgets`)."""
        return len(self.drop(namespace, chunk_ids))

    def stats(self) -> tuple[StoreStats, ...]:
        """One record; present sizes are those of the service, 0 if it does not answer."""
        usage = Usage(0, 0)
        if not self._closed:
            usage = self._guard.run(self._backend.usage, usage)
        return (self._counters.stats(entries=usage.entries, nbytes=usage.nbytes, budget=self._budget),)

    @property
    def health(self) -> DeadlineStats:
        """Time-outs, errors and refusals so far."""
        return self._guard.stats()

    @property
    def pending_forgets(self) -> int:
        """Namespaces with forgets that the service has not confirmed. They are lost if this process ends."""
        return len(self._pending)

    def close(self) -> None:
        """Close connections; further calls are misses."""
        self._closed = True
        self._guard.close()
        self._end()

    def _load(self, key: KVKey) -> ChunkKV | None:
        blob = self._backend.load(key) if self._settled(key) else None
        if blob is None:
            return None
        try:
            return from_bytes(self._seal.opened(key.digest(), blob), key)
        except OtherKey:
            self._counters.warn_once("key", "holds entries that were signed with another key; not used")
        except EntryDamaged as error:
            self._counters.warn_once("damaged", "dropped a damaged entry: %s", error)
            self._counters.count("damaged")
            self._backend.delete(key)
        return None

    def _put(self, key: KVKey, kv: ChunkKV, limit: int) -> bool:
        # Counted before asking whether the entry is forgotten: no forget slips in between.
        forgets, awaited = self._pending.count, Event()
        awaited.set()
        try:
            saved = self._guard.run(lambda: self._save(key, kv, forgets, limit, awaited), Saved(False))
        finally:
            awaited.clear()
        self._counters.count("evictions", saved.evicted)
        if saved.kept:
            self._kept[key.digest()] = None
            if len(self._kept) > _MOST_REMEMBERED:
                self._kept.pop(next(iter(self._kept)), None)
        return saved.kept

    def _save(self, key: KVKey, kv: ChunkKV, forgets: int, limit: int, awaited: Event) -> Saved:
        if not self._settled(key):
            return Saved(False)
        blob = self._seal.sealed(key.digest(), to_bytes(key, kv))
        if len(blob) > limit:  # header and seal made the difference
            return Saved(False)
        known = key.digest() in self._kept  # what was kept before stays, however late the same comes again
        saved = self._backend.save(
            key, blob, lambda: (known or awaited.is_set()) and self._pending.count == forgets
        )
        if saved.kept and not known and not awaited.is_set():  # it came late, and was refused
            self._backend.delete(key)
        return saved

    def _settled(self, key: KVKey) -> bool:
        """Retry pending forgets if it is time; whether the service may be asked for ``key``."""
        due = self._pending and time.monotonic() >= self._retry_at
        if due and self._telling.acquire(blocking=False):  # else another thread does
            try:
                for namespace in self._pending.namespaces():
                    if namespace not in self._dropping:
                        with suppress(Exception):  # it keeps no other namespace, and is tried again
                            self._tell(namespace, set())
            finally:
                self._telling.release()
        return not self._pending.concern(key)

    def _forget(self, namespace: str, dropped: set[str], lookup_budget: float) -> None:
        if not self._telling.acquire(timeout=lookup_budget):
            raise TimeoutError("an earlier forget has not ended")
        try:
            self._tell(namespace, dropped)
        except Left:
            pass  # no failure of the service
        finally:
            self._telling.release()

    def _tell(self, namespace: str, dropped: set[str]) -> None:
        chunk_ids, number = self._pending.of(namespace)
        try:
            self._backend.forget(namespace, chunk_ids, dropped)
        except BaseException as error:
            self._retry_at = time.monotonic() + AGAIN_SECONDS
            self._counters.warn_once("forget", "a forget is not done, and is tried again: %s", error)
            raise
        self._pending.confirm(namespace, number)
