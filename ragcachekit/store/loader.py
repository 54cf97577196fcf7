"""Reads entries of slow tiers in the background: layer 0 of all pieces first, then layer 1, and so on."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable

from ragcachekit.store.base import Found, KVStore, concerns
from ragcachekit.store.crew import Crew
from ragcachekit.store.desk import Desk, Observe
from ragcachekit.store.loading import Hit, LoadingKV
from ragcachekit.store.process import PerProcess
from ragcachekit.store.reading import end, work
from ragcachekit.types import KVKey

THREADS = 2
DEADLINE_SECONDS = 30.0
BYTES_IN_FLIGHT = 1 << 30

MOST_PREFETCHES = 1024
"""Keys that may wait to be prefetched; the oldest are given up first."""


class Loader:
    """Finds entries in a store and reads those of slow tiers in background threads.

    An entry that several requests want at once is read once. Damage, I/O errors and deadlines end as
    :class:`~ragcachekit.store.loading.LoadFailed` for those who wait for the layer. Thread safe.

    Parameters
    ----------
    store : KVStore
    threads : int
        Reads at the same time.
    deadline : float
        Seconds after which a request does not wait for an entry any longer.
    bytes_in_flight : int
        How much may be prefetched ahead of prompts; one entry may pass it. What requests ask for is read
        in any case.
    observe : callable
        Hears how long each read took.
    """

    def __init__(
        self,
        store: KVStore,
        *,
        threads: int = THREADS,
        deadline: float = DEADLINE_SECONDS,
        bytes_in_flight: int = BYTES_IN_FLIGHT,
        observe: Observe = lambda *_: None,
    ) -> None:
        if threads < 1 or deadline <= 0 or bytes_in_flight < 1:
            raise ValueError("threads and bytes_in_flight must be at least 1, and the deadline > 0 seconds")
        self._deadline = deadline
        self._desks = desks = PerProcess(lambda: Desk(store, observe, bytes_in_flight, Crew(threads), work))
        # At exit too: an interpreter that goes while a thread is inside the store may crash.
        self._end = weakref.finalize(self, lambda: end(desks.get()))

    @property
    def _desk(self) -> Desk:
        return self._desks.get()

    def open(self, key: KVKey, worth: float = 1.0) -> Hit | None:
        """What the store has, without reading its layers: :meth:`begin` does, for all of a prompt at once."""
        desk = self._desk
        with desk.changed:
            desk.sweep()
            load = desk.find(key)
            handle = LoadingKV(load, self._deadline) if load is not None else None
            forgets = desk.forgets
        if handle is None:
            opened = desk.store.open(key, worth)
            if opened is None or isinstance(opened, Found):
                return Hit(opened.kv, opened.tier) if opened is not None else None
            if desk.crew.hopeless:
                opened.close()
                return None
            handle = desk.share(key, opened, lambda load: LoadingKV(load, self._deadline), forgets)
        return Hit(handle, handle.tier) if handle is not None else None

    def begin(self, handles: Iterable[LoadingKV]) -> None:
        """Read these for one request; those of earlier requests come first."""
        desk = self._desk
        with desk.changed:
            rank = next(desk.ranks)
            for handle in handles:
                load = handle.load
                load.rank = min(load.rank, rank)
                load.begun = load.begun or time.perf_counter()
                load.prefetched = False
                desk.unhold(load)
                handle.claimed()
            desk.wake()

    def start(self, key: KVKey, worth: float = 1.0) -> Hit | None:
        """:meth:`open` and :meth:`begin`."""
        hit = self.open(key, worth)
        if hit is not None and isinstance(hit.kv, LoadingKV):
            self.begin([hit.kv])
        return hit

    def release(self, handles: Iterable[LoadingKV]) -> None:
        """Give back what was opened and is not wanted; dropping a handle does the same, later."""
        with self._desk.changed:
            for handle in handles:
                handle.load.handles.discard(handle)
            self._desk.sweep()

    def prefetch(self, keys: Iterable[KVKey]) -> None:
        """Begin to load what a prompt may soon want, behind everything that a request waits for.

        The first prompt that wants such an entry takes it over. One that nobody wants ends in the
        store's faster tiers, where there are any, and is let go after a while.
        """
        desk = self._desk
        with desk.changed:
            if desk.closed:
                return
            desk.sweep()
            known = {*desk.findable, *desk.queue}
            desk.queue.extend(key for key in dict.fromkeys(keys) if key not in known)
            while len(desk.queue) > MOST_PREFETCHES:
                desk.queue.popleft()
            desk.wake()

    def cancel(self, keys: Iterable[KVKey] | None = None) -> None:
        """Give up what was prefetched (these, or all) and no request has asked for."""
        gone = None if keys is None else frozenset(keys)
        with self._desk.changed:
            self._desk.drop(lambda key: gone is None or key in gone)

    def forget(self, namespace: str, chunk_ids: frozenset[str] | None = None) -> None:
        """Hand nothing out any more that ``store.forget`` with the same arguments was about.

        Call it after that: what somebody opens in between would be handed out.
        """
        desk = self._desk
        with desk.changed:
            desk.forgets += 1
            desk.drop(lambda key: concerns(key, namespace, chunk_ids))
            for load in desk.active:
                # Requests that have it already keep it, as they would keep what ``get`` returned.
                if concerns(load.key, namespace, chunk_ids):
                    desk.hide(load)

    def discard(self, key: KVKey) -> None:
        """Drop an entry that nobody could use, from the store too."""
        desk = self._desk
        with desk.changed:
            desk.drop(lambda other: other == key)
            for load in [load for load in desk.active if load.key == key]:
                desk.hide(load)
        desk.store.discard(key)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until nothing is being read and no key waits for it; False if ``timeout`` did not suffice."""
        desk = self._desk
        return desk.changed.wait_for(desk.idle, timeout)

    def close(self) -> None:
        """Finish the reads in work, give the others up, end the threads."""
        self._end()
