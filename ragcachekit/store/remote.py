"""A tier on a service that may be slow, dead or hostile."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from threading import Lock
from typing import NamedTuple, Protocol

from ragcachekit.errors import StoreError
from ragcachekit.model.kv import ChunkKV
from ragcachekit.store.base import Counters, Found, KVStore, StoreStats, concerns, quota_of
from ragcachekit.store.deadlines import DeadlineExecutor
from ragcachekit.store.entry import EntryDamaged, check_storable, decode_entry, encode_entry, read_header
from ragcachekit.store.seal import OVERHEAD, OtherKey, Seal, body
from ragcachekit.threads import refuse_after_fork
from ragcachekit.types import KVKey


class Usage(NamedTuple):
    """Entries, their bytes, and the bytes that they may take."""

    entries: int = 0
    nbytes: int = 0
    budget: int = 0


class Backend(Protocol):
    """Named byte strings on a service that evicts the least recently used first.

    Methods may block and raise anything: they run with a deadline, in several threads, and may end after the
    caller has given up. Implementations promise:

    - an entry is whole, missing, or its seal does not match;
    - an entry saved late never survives a ``forget`` called after its ``save``, or that ``forget`` raises.
    """

    def open(self) -> None:
        """Evict what exceeds the budget, and warn of a service that is set up badly."""
        ...

    def load(self, key: KVKey) -> bytes | None:
        """Return the entry under ``key``, now the most recently used one, or None."""
        ...

    def save(self, key: KVKey, blob: memoryview, wanted: Callable[[], bool]) -> int | None:
        """Keep ``blob`` under ``key`` if ``wanted()``: it was not forgotten meanwhile.

        Return how many entries this process evicted for it, or None if it is not kept.
        """
        ...

    def delete(self, key: KVKey) -> None:
        """Drop the entry under ``key``."""
        ...

    def exists(self, key: KVKey) -> bool:
        """Whether there is an entry under ``key``."""
        ...

    def forget(self, namespace: str, chunk_ids: frozenset[str] | None, dropped: set[str]) -> None:
        """As :meth:`~ragcachekit.store.base.KVStore.forget`, adding digests to ``dropped``."""
        ...

    def usage(self) -> Usage:
        """Return the present content."""
        ...

    def close(self) -> None:
        """Close connections; does not wait."""
        ...


def key_of_sealed(head: bytes, size: int) -> KVKey:
    """The key in the first bytes of a sealed entry of ``size`` bytes, whose seal is not checked.

    EntryDamaged unless its header is whole.
    """
    raw = body(memoryview(head))
    header, _ = read_header(lambda at, nbytes: bytes(raw[at : at + nbytes]), size - OVERHEAD)
    return header.key


FORGET_DEADLINES = 10
"""Deadlines that ``forget`` and opening may take: no answer waits for them."""


class RemoteStore(KVStore):
    """Sealed chunk KV on a :class:`~ragcachekit.store.remote.Backend`, with deadlines.

    If the service does not answer within the deadline, methods return a miss, False or nothing; ``forget``
    takes up to ten deadlines and then raises StoreError. Entries of such a forget are misses in this process,
    and are not put, until a forget of them succeeds.

    Parameters
    ----------
    tier : str
        Its name in reports.
    key : bytes, str or None
        Signs entries: bytes, or the name of an environment variable.
    deadline : float
        Seconds per operation, enough to read and verify an entry.
    max_entry : int, optional
        Bytes of the largest entry; a put of a larger one is False and counts as no failure.
    budget : int, optional
        Bytes that all sealed entries may take together, where this process evicts.
    quotas : mapping of str to int
        Bytes that single namespaces may take; ``*`` stands for every other one.
    """

    shared = True
    remote = True

    def __init__(
        self,
        tier: str,
        backend: Backend,
        *,
        key: bytes | str | None,
        deadline: float,
        max_entry: int | None = None,
        budget: int | None = None,
        quotas: Mapping[str, int] | None = None,
    ) -> None:
        self._tier, self._backend, self._seal = tier, backend, Seal(key)
        self._executor = DeadlineExecutor(tier, deadline)
        self._max_entry, self._budget, self._quotas = max_entry, budget, dict(quotas or {})
        self._counters = Counters(tier)
        self._closed = False
        self._forgets = 0
        self._unconfirmed: dict[str, frozenset[str] | None] = {}  # namespace to ids; None is all of it
        self._lock = Lock()  # around changes of both
        refuse_after_fork(self)
        self._executor.run(backend.open, None, FORGET_DEADLINES * deadline)

    def get(self, key: KVKey, weight: float = 1.0) -> Found | None:
        """The verified entry under ``key``, now the most recently used one, or None."""
        kv = self._executor.look(lambda: self._load(key), None) if self._is_served(key) else None
        if kv is None:
            self._counters.count("misses")
            return None
        self._counters.count("hits")
        return Found(kv, self._tier)

    def put(self, key: KVKey, kv: ChunkKV) -> bool:
        """Seal and keep ``kv``.

        False if the entry is too large, something is forgotten meanwhile, a forget of it was not confirmed,
        or the service does not answer in time: then it may arrive later. TypeError for KV of a dtype without
        a safetensors name.
        """
        check_storable(kv)
        if self._closed or (self._max_entry is not None and kv.nbytes > self._max_entry):
            return False
        limit = quota_of(self._quotas, key.namespace)
        if self._budget is not None:
            limit = min(self._budget, limit or self._budget)
        if limit is not None and kv.nbytes > limit:
            self._counters.warn_once("large", "entry of %d bytes exceeds the limit %d", kv.nbytes, limit)
        elif (evicted := self._save(key, kv, limit)) is not None:
            self._counters.count("evictions", evicted)
            return True
        self._counters.count("failed_writes")
        return False

    def __contains__(self, key: KVKey) -> bool:
        return self._is_served(key) and self._executor.look(lambda: self._backend.exists(key), False)

    def discard(self, key: KVKey) -> None:
        """Delete an unusable entry and count it as damaged."""
        if key in self:
            self._counters.count("damaged")
            self._executor.run(lambda: self._backend.delete(key), None)

    def drop(self, namespace: str, chunk_ids: frozenset[str] | None = None) -> frozenset[str]:
        """Drop entries; StoreError if the service does not confirm it: then some may be left."""
        if self._closed or (chunk_ids is not None and not chunk_ids):
            return frozenset()
        self._hide(namespace, chunk_ids)  # before: what is being saved is refused, or deleted
        dropped: set[str] = set()

        def forget() -> str:
            try:
                self._backend.forget(namespace, chunk_ids, dropped)
            except Exception as error:
                return f"{type(error).__name__}: {error}"
            return ""

        failure = self._executor.run(forget, "no answer in time", FORGET_DEADLINES * self._executor.deadline)
        if failure:
            self._hide(namespace, chunk_ids)  # another forget may have been confirmed meanwhile
            raise StoreError(
                f"the {self._tier} tier may hold what was to be forgotten; forget again: {failure}"
            )
        self._show(namespace, chunk_ids)
        return frozenset(dropped)

    def stats(self) -> tuple[StoreStats, ...]:
        """One record; sizes come from the service, 0 if it does not answer."""
        usage = Usage(budget=self._budget or 0)
        if not self._closed:
            usage = self._executor.run(self._backend.usage, usage)
        return (self._counters.stats(**usage._asdict()),)

    def close(self) -> None:
        """Close connections; further calls are misses."""
        self._closed = True
        self._executor.close()
        self._backend.close()

    def _is_served(self, key: KVKey) -> bool:
        """Whether the store is open and no forget of the entry is unconfirmed."""
        hidden = self._unconfirmed.get(key.namespace, frozenset())
        return not self._closed and not concerns(key, key.namespace, hidden)

    def _hide(self, namespace: str, chunk_ids: frozenset[str] | None) -> None:
        """Refuse puts of entries to be forgotten, and look none of them up."""
        with self._lock:
            hidden = self._unconfirmed.get(namespace, frozenset())
            self._unconfirmed[namespace] = None if hidden is None or chunk_ids is None else hidden | chunk_ids
            self._forgets += 1  # last: a put that reads the new count finds the entry hidden

    def _show(self, namespace: str, chunk_ids: frozenset[str] | None) -> None:
        """Undo :meth:`_hide` for a confirmed forget; of single chunks only if not all are hidden."""
        with self._lock:
            hidden = self._unconfirmed.get(namespace)
            if chunk_ids is None or (hidden is not None and hidden <= chunk_ids):
                self._unconfirmed.pop(namespace, None)
            elif hidden is not None:
                self._unconfirmed[namespace] = hidden - chunk_ids

    def _load(self, key: KVKey) -> ChunkKV | None:
        blob = self._backend.load(key)
        if blob is None:
            return None
        try:
            return decode_entry(self._seal.opened(key.digest(), blob), key)
        except OtherKey:
            self._counters.warn_once("key", "holds entries that were signed with another key; not used")
        except EntryDamaged as error:
            self._counters.warn_once("damaged", "dropped a damaged entry: %s", error)
            self._counters.count("damaged")
            self._backend.delete(key)
        return None

    def _save(self, key: KVKey, kv: ChunkKV, limit: int | None) -> int | None:
        forgets = self._forgets
        if not self._is_served(key):
            return None

        def save() -> int | None:
            blob = self._seal.sealed(key.digest(), encode_entry(key, kv))
            if limit is not None and len(blob) > limit:  # with header and seal
                return None
            return self._backend.save(key, blob, lambda: self._forgets == forgets)

        return self._executor.run(save, None)
