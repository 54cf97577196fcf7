"""A tier on a service that may be slow, dead or hostile: sealed entries, deadlines, forgetting that lasts."""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping
from threading import Event, Lock

from ragcachekit.forks import refuse_after_fork
from ragcachekit.model.kv import ChunkKV
from ragcachekit.store.base import Evicted, Found, LayerSource, StoreStats, quota_of
from ragcachekit.store.counters import Counters
from ragcachekit.store.entry_bytes import from_bytes, to_bytes
from ragcachekit.store.entry_header import EntryDamaged
from ragcachekit.store.entry_layout import storable
from ragcachekit.store.guard import Guard, GuardStats
from ragcachekit.store.pending import Forget, PendingForgets
from ragcachekit.store.process import PerProcess
from ragcachekit.store.remote_base import Backend, Left, NotHeard, Saved, Usage
from ragcachekit.store.seal import OtherKey, Seal
from ragcachekit.types import KVKey

PATIENCE = 10
"""Deadlines that ``forget`` waits for: no answer is waiting for it."""

_MOST_REMEMBERED = 10_000
AGAIN_SECONDS = 1.0
"""How often operations on other entries tell a service that is well what it could not forget."""


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
        self._locks, self._settlings = PerProcess(Lock), PerProcess(Lock)
        self._pending = PendingForgets()
        self._forgets = 0
        self._kept: dict[str, None] = {}  # digests of puts that were not refused
        # Whoever drops a store without closing it leaves no connection open. Not at exit: that may hang.
        self._end = weakref.finalize(self, _end, guard, backend)
        self._end.atexit = False
        refuse_after_fork(self)

    def get(self, key: KVKey, worth: float = 1.0) -> Found | None:
        """The entry under ``key``, its seal verified, now the most recently used one, or None."""
        kv = None
        if not self._closed:
            kv = self._guard.look(lambda: self._load(key), None)
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
        time (what arrives late is deleted again), or it has not yet heard that this was forgotten.

        Raises
        ------
        TypeError
            For KV of a dtype that safetensors does not know.
        """
        for tensor in (*kv.keys, *kv.values, *kv.sums.values()):
            storable(tensor.dtype)
        forgets = self._forgets  # before asking whether it is forgotten: no forget slips in between
        if self._closed:
            return False
        limit = min(self._budget, quota_of(self._quotas, key.namespace) or self._budget)
        if kv.nbytes > limit:
            self._counters.warn_once("large", "entry of %d bytes exceeds the limit %d", kv.nbytes, limit)
        elif self._largest is not None and kv.nbytes > self._largest:
            return False
        else:
            awaited = Event()
            awaited.set()
            try:
                saved = self._guard.run(lambda: self._save(key, kv, forgets, limit, awaited), Saved(False))
            finally:
                awaited.clear()
            self._counters.count("evictions", saved.evicted)
            if saved.kept:
                self._remember(key)
                return True
        self._counters.count("failed_writes")
        return False

    def admit(self, key: KVKey, kv: ChunkKV) -> tuple[bool, Evicted]:
        """As :meth:`put`; nobody is handed down."""
        return self.put(key, kv), ()

    def __contains__(self, key: KVKey) -> bool:
        return not self._closed and self._guard.look(lambda: self._ask(key), False)

    def discard(self, key: KVKey) -> None:
        """Have the entry under ``key`` deleted, which nobody could use, and count it as damaged."""
        if key in self:
            self._counters.count("damaged")
            self._guard.run(lambda: self._backend.delete(key), None)

    def drop(self, namespace: str, chunk_ids: frozenset[str] | None = None) -> frozenset[str]:
        """As :meth:`forget`, returning the digests of the dropped keys."""
        if self._closed:
            return frozenset()
        with self._locks.get():
            self._forgets += 1
            forget = self._pending.add(namespace, chunk_ids)
        patience = PATIENCE * self._guard.deadline
        try:
            self._guard.run(lambda: self._forget(forget, patience), None, patience)
        finally:
            self._pending.leave(forget)
        if not (forget.done or forget.again):
            self._counters.warn_once(
                "forget", "does not answer; nothing forgotten is read from it, and it will be told later"
            )
        return frozenset(forget.dropped)

    def forget(self, namespace: str, chunk_ids: frozenset[str] | None = None) -> int:
        """Drop entries; returns how many went at once.

        If the service does not answer, or another process is still writing in this namespace, the rest
        goes later (see :attr:`pending_forgets`).
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
        """Namespaces with forgets that are not done: the service has not heard of them, something could not
        be deleted, or a write that they refused has not ended.

        They are lost if this process ends before.
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

    def _save(self, key: KVKey, kv: ChunkKV, forgets: int, limit: int, awaited: Event) -> Saved:
        if not self._settled(key):
            return Saved(False)
        blob = self._seal.sealed(key.digest(), to_bytes(key, kv))
        if len(blob) > limit:  # header and seal made the difference
            return Saved(False)
        known = key.digest() in self._kept  # what was kept before stays, however late the same comes again
        saved = self._backend.save(
            key, blob, lambda: (known or awaited.is_set()) and self._forgets == forgets
        )
        if saved.kept and not known and not awaited.is_set():  # it came late, and was refused
            self._backend.delete(key)
        return saved

    def _remember(self, key: KVKey) -> None:
        self._kept[key.digest()] = None
        if len(self._kept) > _MOST_REMEMBERED:
            self._kept.pop(next(iter(self._kept)), None)

    def _ask(self, key: KVKey) -> bool:
        return self._settled(key) and self._backend.exists(key)

    def _settled(self, key: KVKey) -> bool:
        """Tell the service what it has missed; whether it may be asked about ``key`` now."""
        self._settle(key)
        return not self._forgotten(key)

    def _forget(self, forget: Forget, patience: float) -> None:
        errors = self._settle(None, patience)
        if errors and not forget.done:
            raise errors[0]

    def _settle(self, key: KVKey | None, patience: float = 0) -> list[Exception]:
        """Tell the service what to forget before ``key`` is asked for, unless another thread is at it for
        longer than ``patience``. What cannot be told keeps none of the others; returns why."""
        errors: list[Exception] = []
        settling = self._settlings.get()
        if not self._pending or not settling.acquire(timeout=patience):
            return errors
        try:
            for forget in self._pending.all():
                if self._due(forget, key):
                    try:
                        self._tell(forget)
                    except Exception as error:
                        errors.append(error)
        finally:
            settling.release()
        return errors

    def _due(self, forget: Forget, key: KVKey | None) -> bool:
        if forget.swept and not self._backend.hears:
            return False
        return forget.again <= time.monotonic() or (key is not None and forget.concerns(key))

    def _tell(self, forget: Forget) -> None:
        try:
            with self._pending.telling(forget) as chunk_ids:
                self._backend.forget(forget.namespace, chunk_ids, forget.dropped, forget.awaits)
        except NotHeard as unheard:
            forget.swept, forget.awaits = True, unheard.awaits
            forget.again = time.monotonic() + AGAIN_SECONDS if unheard.awaits else 0.0
        except Left as left:
            forget.awaits, forget.again = frozenset(), time.monotonic() + AGAIN_SECONDS
            self._counters.warn_once("left", "not all could be forgotten; it is tried again: %s", left)


def _end(guard: Guard, backend: Backend) -> None:
    guard.close()
    backend.close()
