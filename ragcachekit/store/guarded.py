"""Stores of the user's own: what they raise, and the time that they take, reaches no request."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar

import torch

from ragcachekit.errors import StoreError
from ragcachekit.model.kv import ChunkKV
from ragcachekit.store.base import Found, KVStore, StoreStats, concerns
from ragcachekit.store.entry import EntryDamaged
from ragcachekit.store.remote import DeadlineExecutor, Forgetting
from ragcachekit.threads import Job, attempt
from ragcachekit.types import KVKey

T = TypeVar("T")

DIGEST = "key"
"""Name in ``sums`` of the digest of the key that an entry was put under."""


def guarded(store: KVStore, deadline: float) -> KVStore:
    """``store`` itself if it is one of this library's, else guarded."""
    parts = (store, *getattr(store, "tiers", ()))
    own = all(type(part).__module__.startswith("ragcachekit.store.") for part in parts)
    return store if own else GuardedStore(store, deadline)


class GuardedStore(KVStore):
    """Calls the methods of ``store`` in threads, for up to ``deadline`` seconds each.

    What raises, is late or returns something else than a :class:`KVStore` should is a miss or a refused put,
    and counts as one of the ``failures``. :class:`DeadlineExecutor` says when the store is not asked.
    ``forget`` takes up to ten deadlines, and raises StoreError if it fails or a put goes on after its own;
    until it succeeds, its entries are misses. So is an entry that was put under another key, and it is
    dropped. ``in_memory`` may not block: it is called directly. Entries are got whole, not layer by layer.
    """

    def __init__(self, store: KVStore, deadline: float) -> None:
        self._store, self._name = store, type(store).__name__
        self._executor = DeadlineExecutor(self._name, deadline)
        # Asked in any case, after whatever failures.
        self._forgets = Forgetting(self._name, DeadlineExecutor(f"{self._name}-forget", deadline))
        self._records: tuple[StoreStats, ...] = ()
        self._late: dict[Job, KVKey] = {}  # puts that were given up

    def get(self, key: KVKey, weight: float = 1.0) -> Found | None:
        return self._ask(key, lambda: self._checked(key, self._store.get(key, weight)), None)

    def __contains__(self, key: KVKey) -> bool:
        return self._ask(key, lambda: bool(key in self._store), False)

    def in_memory(self, key: KVKey) -> bool:
        return bool(attempt(self._store.in_memory, key))

    def put(self, key: KVKey, kv: ChunkKV) -> bool:
        digest = torch.frombuffer(bytearray.fromhex(key.digest()), dtype=torch.uint8)
        kv = ChunkKV.checked(kv.keys, kv.values, kv.start, {**kv.sums, DIGEST: digest}, kv.quantised)
        job = Job(lambda: self._store.put(key, kv))
        kept = not self._forgets.hides(key) and bool(self._executor.run(job, False))
        if job.given_up and job.begun:
            self._late[job] = key
        for ended in [job for job in list(self._late) if job.done]:
            self._late.pop(ended, None)
        return kept

    def discard(self, key: KVKey, *, damaged: bool = True) -> None:
        self._executor.run(lambda: self._store.discard(key, damaged=damaged), None)

    def keys(self, *, in_memory: bool = False) -> Iterator[KVKey]:
        keys = self._executor.run(lambda: list(self._store.keys(in_memory=in_memory)), list[KVKey]())
        return iter(keys)

    def forget(self, namespace: str, chunk_ids: frozenset[str] | None = None) -> int:
        late = list(self._late.items())
        running = any(concerns(key, namespace, chunk_ids) and not job.done for job, key in late)

        def forget() -> int:
            dropped = self._store.forget(namespace, chunk_ids)
            if running:
                raise StoreError("a put of it has not ended")
            return dropped

        return self._forgets.run(forget, namespace, chunk_ids)

    def stats(self) -> tuple[StoreStats, ...]:
        """The store's own records, or its last ones, with the failures in the last of them."""
        self._records = self._executor.run(lambda: tuple(self._store.stats()), self._records)
        if not self._executor.failures:
            return self._records
        *others, last = self._records or (StoreStats(self._name, 0, 0, 0, 0, 0, 0, 0, 0),)
        return (*others, replace(last, failures=last.failures + self._executor.failures))

    def close(self) -> None:
        self._executor.run(self._store.close, None)
        self._executor.close()

    def _ask(self, key: KVKey, ask: Callable[[], T], default: T) -> T:
        return default if self._forgets.hides(key) else self._executor.run(ask, default)

    def _checked(self, key: KVKey, found: Found | None) -> Found | None:
        if found is None:
            return None
        kv = found.kv if isinstance(found, Found) else found
        if not isinstance(kv, ChunkKV):
            raise TypeError(f"it returned a {type(kv).__name__}, not None or Found")
        put_under = kv.sums.get(DIGEST)
        if put_under is not None and bytes(put_under.tolist()).hex() != key.digest():
            self._store.discard(key)
            raise EntryDamaged("it returned the entry of another key")
        return found if isinstance(found, Found) else Found(kv, self._name)
