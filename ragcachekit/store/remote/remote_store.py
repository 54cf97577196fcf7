"""A tier on a service that may be slow, dead or hostile."""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from threading import Lock

from ragcachekit.forks import refuse_after_fork
from ragcachekit.model.kv import ChunkKV
from ragcachekit.store.base import Evicted, Found, StoreStats, Tier, quota_of
from ragcachekit.store.counters import Counters
from ragcachekit.store.entry.header import EntryDamaged
from ragcachekit.store.entry.image import EntryImage, from_bytes
from ragcachekit.store.entry.layout import storable
from ragcachekit.store.remote.base import Backend, Usage
from ragcachekit.store.remote.deadlines import DeadlineExecutor
from ragcachekit.store.remote.pending_deletes import Pending, PendingDeletes
from ragcachekit.store.remote.seal import OtherKey, Seal
from ragcachekit.types import KVKey

FORGET_DEADLINES = 10
"""Deadlines that ``forget`` and opening may take: no answer waits for them."""

RETRY_SECONDS = 1.0
"""How long after a forget that failed it is tried again."""


class RemoteStore(Tier):
    """Sealed chunk KV on a :class:`~ragcachekit.store.remote.base.Backend`, with deadlines.

    If the service does not answer within the deadline (ten of them for ``forget``), methods return a miss,
    False or nothing. A forget that the service has not confirmed is pending: this store neither reads nor
    writes such entries, and operations retry the forget, once a second at most.

    Parameters
    ----------
    tier : str
        Its name in reports.
    budget : int
        Bytes that all sealed entries may take together; > 0.
    key : bytes, str or None
        Signs entries: bytes, or the name of an environment variable.
    deadline : float
        Seconds per operation, enough to read and verify an entry.
    largest : int or None
        Bytes of the largest entry; a put of a larger one is False and counts as no failure.
    quotas : mapping of str to int
        Bytes that single namespaces may take; ``*`` stands for every other one.
    """

    shared = True
    remote = True

    def __init__(
        self,
        tier: str,
        backend: Backend,
        budget: int,
        *,
        key: bytes | str | None,
        deadline: float,
        largest: int | None = None,
        quotas: Mapping[str, int] | None = None,
    ) -> None:
        if budget <= 0:
            raise ValueError(
                f"the {tier} tier's budget must be > 0 bytes, got {budget}; leave the tier out instead"
            )
        self._tier, self._backend, self._seal = tier, backend, Seal(key)
        self._executor = DeadlineExecutor(tier, deadline)
        self._budget, self._largest, self._quotas = budget, largest, dict(quotas or {})
        self._counters = Counters(tier)
        self._closed = False
        self._pending = PendingDeletes()
        self._deleting = Lock()
        self._retry_at = 0.0  # monotonic seconds
        # A store dropped without close leaves no connection open. Not at exit: that may hang.
        self._end = weakref.finalize(self, backend.close)
        self._end.atexit = False
        refuse_after_fork(self)
        self._executor.run(backend.open, None, FORGET_DEADLINES * deadline)

    def get(self, key: KVKey, weight: float = 1.0) -> Found | None:
        """The verified entry under ``key``, now the most recently used one, or None."""
        kv = None if self._closed else self._executor.look(lambda: self._load(key), None)
        if kv is None or self._pending.concern(key):  # forgotten while it was read
            self._counters.count("misses")
            return None
        self._counters.count("hits")
        return Found(kv, self._tier)

    def put(self, key: KVKey, kv: ChunkKV) -> bool:
        """Seal and keep ``kv``, evicting least recently used entries.

        False if the entry is too large, a forget of it is pending, or the service does not answer in time:
        then it may arrive later. TypeError for KV of a dtype without a safetensors name.
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
        elif (evicted := self._put(key, kv, limit)) is not None:
            self._counters.count("evictions", evicted)
            return True
        self._counters.count("failed_writes")
        return False

    def admit(self, key: KVKey, kv: ChunkKV) -> tuple[bool, Evicted]:
        """As :meth:`put`; evicted entries are not handed down."""
        return self.put(key, kv), ()

    def __contains__(self, key: KVKey) -> bool:
        return not self._closed and self._executor.look(
            lambda: self._may_use(key) and self._backend.exists(key), False
        )

    def discard(self, key: KVKey) -> None:
        """Delete an unusable entry and count it as damaged."""
        if key in self:
            self._counters.count("damaged")
            self._executor.run(lambda: self._backend.delete(key), None)

    def drop(self, namespace: str, chunk_ids: frozenset[str] | None = None) -> frozenset[str]:
        """Drop entries. What the service does not confirm is pending (:attr:`pending_forgets`)."""
        dropped: set[str] = set()
        if self._closed or (chunk_ids is not None and not chunk_ids):
            return frozenset()
        seconds = FORGET_DEADLINES * self._executor.deadline
        self._pending.add(namespace, chunk_ids)
        self._executor.run(lambda: self._forget(namespace, dropped, seconds), None, seconds)
        if self._pending:
            self._counters.warn_once("pending", "a forget is pending; this process reads nothing of it")
        return frozenset(dropped)

    def stats(self) -> tuple[StoreStats, ...]:
        """One record; sizes come from the service, 0 if it does not answer."""
        usage = Usage(0, 0)
        if not self._closed:
            usage = self._executor.run(self._backend.usage, usage)
        return (self._counters.stats(entries=usage.entries, nbytes=usage.nbytes, budget=self._budget),)

    @property
    def pending_forgets(self) -> int:
        """Namespaces with unconfirmed forgets. They are lost if this process ends."""
        return len(self._pending)

    def close(self) -> None:
        """Close connections; further calls are misses."""
        self._closed = True
        self._executor.close()
        self._end()

    def _load(self, key: KVKey) -> ChunkKV | None:
        blob = self._backend.load(key) if self._may_use(key) else None
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

    def _put(self, key: KVKey, kv: ChunkKV, limit: int) -> int | None:
        # Counted before asking whether the entry is forgotten: no forget slips in between.
        forgets = self._pending.count

        def save() -> int | None:
            if not self._may_use(key):
                return None
            blob = self._seal.sealed(key.digest(), EntryImage(key, kv).parts())
            if len(blob) > limit:  # with header and seal
                return None
            return self._backend.save(key, blob, lambda: self._pending.count == forgets)

        return self._executor.run(save, None)

    def _may_use(self, key: KVKey) -> bool:
        """Retry pending forgets if it is time; whether ``key`` is in none of them."""
        due = self._pending and time.monotonic() >= self._retry_at
        if due and self._deleting.acquire(blocking=False):  # else another thread does
            try:
                for namespace, pending in self._pending.items():
                    with suppress(Exception):  # goes on with other namespaces, and is tried again
                        self._delete(namespace, pending, set())
            finally:
                self._deleting.release()
        return not self._pending.concern(key)

    def _forget(self, namespace: str, dropped: set[str], seconds: float) -> None:
        if not self._deleting.acquire(timeout=seconds):
            raise TimeoutError("an earlier forget has not ended")
        try:
            pending = dict(self._pending.items()).get(namespace)
            if pending is not None:
                self._delete(namespace, pending, dropped)
        finally:
            self._deleting.release()

    def _delete(self, namespace: str, pending: Pending, dropped: set[str]) -> None:
        try:
            self._backend.forget(namespace, pending.chunk_ids, dropped)
        except BaseException as error:
            self._retry_at = time.monotonic() + RETRY_SECONDS
            self._counters.warn_once("forget", "a forget is not done, and is tried again: %s", error)
            raise
        self._pending.confirm(namespace, pending.number)
