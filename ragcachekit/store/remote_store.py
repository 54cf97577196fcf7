"""A tier on a service that may be slow, dead or hostile: sealed entries, deadlines, forgetting that lasts."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from threading import Lock

from ragcachekit.model.kv import ChunkKV
from ragcachekit.store.base import Evicted, Found, LayerSource, StoreStats, quota_of
from ragcachekit.store.counters import Counters
from ragcachekit.store.entry_bytes import from_bytes, to_bytes
from ragcachekit.store.entry_header import EntryDamaged
from ragcachekit.store.entry_layout import TensorSpec
from ragcachekit.store.guard import Guard, GuardStats
from ragcachekit.store.pending import Forget, PendingForgets
from ragcachekit.store.remote_base import Backend, NotHeard, Saved, Usage
from ragcachekit.store.seal import OtherKey, Seal
from ragcachekit.types import KVKey

PATIENCE = 10
"""Deadlines that ``forget`` waits for: no answer is waiting for it."""


class RemoteStore:
    """Sealed chunk KV on a :class:`~ragcachekit.store.remote_base.Backend`, behind a guard.

    A method returns within the guard's deadline (``forget``: ten of them), with a miss, False or nothing
    if the service does not answer. What was forgotten while it did not answer is remembered: this store
    neither reads nor writes such entries, and forgets them there when it answers again.

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
        guard: Guard,
        budget: int,
        *,
        largest: int | None = None,
        quotas: Mapping[str, int] | None = None,
    ) -> None:
        self._tier, self._backend, self._seal, self._guard = tier, backend, seal, guard
        self._budget, self._largest, self._quotas = budget, largest, dict(quotas or {})
        self._counters = Counters(tier)
        self._closed = False
        self._lock = Lock()
        self._settling = Lock()
        self._pending = PendingForgets()
        self._forgets = 0
        # Whoever drops a store without closing it leaves no connection open. Not at exit: that may hang.
        self._end = weakref.finalize(self, _end, guard, backend)
        self._end.atexit = False

    def get(self, key: KVKey, worth: float = 1.0) -> Found | None:
        """The entry under ``key``, its seal verified, now the most recently used one, or None."""
        kv = None
        if not self._closed:
            kv = self._guard.run(lambda: self._load(key), None)
        if kv is None or self._forgotten(key):  # if meanwhile, it is not handed out any more
            self._counters.count("misses")
            return None
        self._counters.count("hits")
        return Found(kv, self._tier)

    def open(self, key: KVKey, worth: float = 1.0) -> Found | LayerSource | None:
        """As :meth:`get`: the seal stands over the whole entry, so no layer can be used before the last."""
        return self.get(key, worth)

    def put(self, key: KVKey, kv: ChunkKV) -> bool:
        """Seal ``kv`` and keep it, evicting least recently used entries.

        False, with all other entries whole, if the entry is too large, the service does not answer in
        time (it may be found there later all the same), or it has not yet heard that this was forgotten.

        Raises
        ------
        TypeError
            For KV of a dtype that safetensors does not know.
        """
        for tensor in (*kv.keys, *kv.values, *kv.sums.values()):
            TensorSpec.of(tensor)
        forgets = self._forgets  # before asking whether it is forgotten: no forget slips in between
        if self._closed:
            return False
        limit = min(self._budget, quota_of(self._quotas, key.namespace) or self._budget)
        if kv.nbytes > limit:
            self._counters.warn_once("large", "entry of %d bytes exceeds the limit %d", kv.nbytes, limit)
        elif self._largest is not None and kv.nbytes > self._largest:
            return False
        else:
            saved = self._guard.run(lambda: self._save(key, kv, forgets, limit), Saved(False))
            self._counters.count("evictions", saved.evicted)
            if saved.kept:
                return True
        self._counters.count("failed_writes")
        return False

    def admit(self, key: KVKey, kv: ChunkKV) -> tuple[bool, Evicted]:
        """As :meth:`put`; nobody is handed down."""
        return self.put(key, kv), ()

    def __contains__(self, key: KVKey) -> bool:
        return not self._closed and self._guard.run(lambda: self._ask(key), False)

    def drop(self, namespace: str, chunk_ids: frozenset[str] | None = None) -> frozenset[str]:
        """As :meth:`forget`, returning the digests of the dropped keys."""
        if self._closed:
            return frozenset()
        with self._lock:
            self._forgets += 1
            forget = self._pending.add(namespace, chunk_ids)
        patience = PATIENCE * self._guard.deadline
        try:
            self._guard.run(lambda: self._settle(patience), False, patience)
        finally:
            self._pending.leave(forget)
        if not forget.done:
            self._counters.warn_once(
                "forget", "does not answer; nothing forgotten is read from it, and it will be told later"
            )
        return frozenset(forget.dropped)

    def forget(self, namespace: str, chunk_ids: frozenset[str] | None = None) -> int:
        """Drop entries; returns how many went at once.

        If the service does not answer, the rest goes when it does (see :attr:`pending_forgets`).
        """
        return len(self.drop(namespace, chunk_ids))

    def stats(self) -> tuple[StoreStats, ...]:
        """One record; present sizes are those of the service, 0 if it does not answer."""
        usage = Usage(0, 0)
        if not self._closed:
            usage = self._guard.run(self._backend.usage, usage)
        return (self._counters.stats(entries=usage.entries, nbytes=usage.nbytes, budget=self._budget),)

    @property
    def health(self) -> GuardStats:
        """Time-outs, errors and refusals so far."""
        return self._guard.stats()

    @property
    def pending_forgets(self) -> int:
        """Namespaces with forgets that the service has not heard of.

        They are lost if this process ends before it does.
        """
        return len(self._pending)

    def close(self) -> None:
        """Let go of connections; further calls are misses."""
        self._closed = True
        self._end()

    def _forgotten(self, key: KVKey) -> bool:
        return self._pending.concern(key)

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

    def _save(self, key: KVKey, kv: ChunkKV, forgets: int, limit: int) -> Saved:
        if not self._settled(key):
            return Saved(False)
        blob = self._seal.sealed(key.digest(), to_bytes(key, kv))
        if len(blob) > limit:  # header and seal made the difference
            return Saved(False)
        return self._backend.save(key, blob, lambda: self._forgets == forgets)

    def _ask(self, key: KVKey) -> bool:
        return self._settled(key) and self._backend.exists(key)

    def _settled(self, key: KVKey) -> bool:
        """Tell the service what it has missed; whether it may be asked about ``key`` now."""
        self._settle()
        return not self._forgotten(key)

    def _settle(self, patience: float = 0) -> bool:
        """Tell the service what to forget; False if another thread is at it for longer than ``patience``."""
        if not self._pending:
            return True
        if not self._settling.acquire(timeout=patience):
            return False
        try:
            for forget in self._pending.all():
                if self._backend.hears or not forget.swept:
                    self._tell(forget)
        finally:
            self._settling.release()
        return True

    def _tell(self, forget: Forget) -> None:
        try:
            with self._pending.telling(forget) as chunk_ids:
                self._backend.forget(forget.namespace, chunk_ids, forget.dropped)
        except NotHeard:
            forget.swept = True


def _end(guard: Guard, backend: Backend) -> None:
    guard.close()
    backend.close()
