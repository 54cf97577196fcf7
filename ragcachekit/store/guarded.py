"""Stores of the user's own: what they raise, and time that they take, reaches no request."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import TypeVar

import torch

from ragcachekit.errors import StoreError
from ragcachekit.model.kv import ChunkKV
from ragcachekit.store.base import Evicted, Found, KVStore, LayerSource, Pair, StoreStats, concerns
from ragcachekit.store.entry import EntryDamaged
from ragcachekit.store.remote import FORGET_DEADLINES, DeadlineExecutor, Unconfirmed, reported
from ragcachekit.threads import refuse_after_fork
from ragcachekit.types import KVKey

log = logging.getLogger(__name__)

T = TypeVar("T")

DIGEST = "key"
"""Name in ``sums`` of the digest of the key that an entry was put under."""


def guarded(store: KVStore, deadline: float) -> KVStore:
    """``store`` itself if it is one of this library's, else guarded."""
    parts = (store, *getattr(store, "tiers", ()))
    own = all(type(part).__module__.startswith("ragcachekit.store.") for part in parts)
    return store if own else GuardedStore(store, deadline)


@dataclass(eq=False)
class _Write:
    """A put, which may go on after its caller has given up; what was forgotten meanwhile."""

    key: KVKey
    given_up: bool = False
    forgotten: list[tuple[str, frozenset[str] | None]] = field(default_factory=list)


class GuardedStore(KVStore):
    """Calls the methods of ``store`` in threads, for up to ``deadline`` seconds each.

    What raises, is late or returns something else than a :class:`KVStore` should is a miss or a refused put,
    and counts as one of the ``failures``. :class:`DeadlineExecutor` says when the store is not asked.
    ``forget`` takes up to ten deadlines and then raises StoreError; until it succeeds, its entries are
    misses. So is an entry that was put under another key, and it is dropped. ``in_memory`` may not block: it
    is called directly.
    """

    def __init__(self, store: KVStore, deadline: float) -> None:
        self._store, self._name = store, type(store).__name__
        self.shared, self.remote = store.shared, store.remote
        self._executor = DeadlineExecutor(self._name, deadline)
        self._unconfirmed = Unconfirmed()
        self._writes: set[_Write] = set()  # that have begun
        self._lock = Lock()  # around them
        self._records: tuple[StoreStats, ...] = ()
        refuse_after_fork(self)

    def get(self, key: KVKey, weight: float = 1.0) -> Found | None:
        return self._ask(key, lambda: self._checked(key, self._store.get(key, weight)), None)  # type: ignore[return-value]

    def open(self, key: KVKey, weight: float = 1.0) -> Found | LayerSource | None:
        return self._ask(key, lambda: self._checked(key, self._store.open(key, weight)), None)

    def sums(self, key: KVKey) -> Mapping[str, torch.Tensor] | None:
        return self._ask(key, lambda: self._store.sums(key), None)

    def __contains__(self, key: KVKey) -> bool:
        return self._ask(key, lambda: bool(key in self._store), False)

    def in_memory(self, key: KVKey) -> bool:
        try:
            return bool(self._store.in_memory(key))
        except Exception:
            log.warning("a store failed to report what is in memory", exc_info=True)
            return False

    def admit(self, key: KVKey, kv: ChunkKV) -> tuple[bool, Evicted]:
        digest = torch.frombuffer(bytearray.fromhex(key.digest()), dtype=torch.uint8)
        kv, write = kv.unpacked(), _Write(key)
        refused: tuple[bool, Evicted] = False, ()
        kv = replace(kv, sums={**kv.sums, DIGEST: digest})

        def put() -> tuple[bool, Evicted]:
            with self._lock:
                if write.given_up:
                    return refused
                self._writes.add(write)
            try:
                kept, evicted = self._store.admit(key, kv)
                return bool(kept), evicted
            finally:
                self._end(write)

        try:
            return self._ask(key, put, refused)
        finally:
            with self._lock:
                write.given_up = True

    def discard(self, key: KVKey, *, damaged: bool = True) -> None:
        self._executor.run(lambda: self._store.discard(key, damaged=damaged), None)

    def keys(self, *, in_memory: bool = False) -> Iterator[KVKey]:
        every = self._executor.run(lambda: tuple(self._store.keys(in_memory=in_memory)), ())
        return iter(every)

    def forget(self, namespace: str, chunk_ids: frozenset[str] | None = None) -> int:
        return self._forget(self._store.forget, namespace, chunk_ids)

    def drop(self, namespace: str, chunk_ids: frozenset[str] | None = None) -> frozenset[str]:
        return self._forget(self._store.drop, namespace, chunk_ids)

    def stats(self) -> tuple[StoreStats, ...]:
        """The store's own records, or its last ones, with the failures in the last of them."""
        self._records = self._executor.run(lambda: tuple(self._store.stats()), self._records)
        *others, last = self._records or (StoreStats(self._name, 0, 0, 0, 0, 0, 0, 0, 0),)
        if not self._executor.failures:
            return self._records
        return (*others, replace(last, failures=last.failures + self._executor.failures))

    def close(self) -> None:
        self._executor.run(self._store.close, None)
        self._executor.close()

    def _ask(self, key: KVKey, ask: Callable[[], T], default: T) -> T:
        """What ``ask`` returns; the default for a forgotten entry, or one that is still being written."""
        if key in self._unconfirmed or any(w.given_up and w.key == key for w in list(self._writes)):
            return default
        return self._executor.run(ask, default)

    def _checked(self, key: KVKey, opened: object) -> Found | LayerSource | None:
        if opened is None:
            return None
        kv = opened.kv if isinstance(opened, Found) else opened
        if not isinstance(kv, ChunkKV | LayerSource):
            raise TypeError(f"it returned a {type(kv).__name__}, not None, Found or LayerSource")
        put_under = kv.sums.get(DIGEST)
        if put_under is not None and bytes(put_under.tolist()).hex() != key.digest():
            self._store.discard(key)
            raise EntryDamaged("it returned the entry of another key")
        if isinstance(kv, ChunkKV):
            return Found(kv, str(opened.tier))  # type: ignore[attr-defined]
        source, shapes = kv, kv.shapes

        def layer(number: int) -> Pair:
            keys, values = source.layer(number)
            if ((keys.dtype, tuple(keys.shape)), (values.dtype, tuple(values.shape))) != shapes[number]:
                self._store.discard(key)
                raise EntryDamaged(f"layer {number} has another shape than it was opened with")
            return keys, values

        def finished(whole: ChunkKV) -> None:
            self._executor.run(lambda: source.finished(whole), None)

        # The loader closes it with its lock held.
        return replace(
            source, layer=layer, finished=finished, close=lambda: self._executor.start(source.close)
        )

    def _end(self, write: _Write) -> None:
        """Forget again what was forgotten while it was written, and show its entry from then on."""
        while True:
            with self._lock:
                if not write.forgotten:
                    self._writes.discard(write)
                    return
                forgotten = write.forgotten.pop()
            self._store.forget(*forgotten)

    def _forget(
        self, forget: Callable[[str, frozenset[str] | None], T], space: str, ids: frozenset[str] | None
    ) -> T:
        self._unconfirmed.add(space, ids)
        with self._lock:
            for write in self._writes:
                if concerns(write.key, space, ids):
                    write.forgotten.append((space, ids))
        done, failures = list[T](), list[str]()
        with reported(failures):
            self._executor.run(
                lambda: done.append(forget(space, ids)), None, FORGET_DEADLINES * self._executor.deadline
            )
        if not done:
            raise StoreError(f"the store may hold what was to be forgotten; forget again: {failures}")
        self._unconfirmed.confirm(space, ids)
        return done[0]
