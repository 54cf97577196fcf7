"""Reads entries of slow tiers in the background: layer 0 of all pieces first, then layer 1, and so on."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable
from operator import methodcaller

from ragcachekit.store.base import Found, KVStore, concerns
from ragcachekit.store.loading.load import Hit, LoadingKV
from ragcachekit.store.loading.load_queue import LoadQueue, Observe
from ragcachekit.store.loading.read_layers import step
from ragcachekit.types import KVKey

THREADS = 2
DEADLINE_SECONDS = 30.0
BYTES_IN_FLIGHT = 1 << 30

MOST_PREFETCHES = 1024
"""Keys that may wait to be prefetched; the oldest are given up first."""


class Loader:
    """Finds entries in a store and reads those of slow tiers in background threads.

    An entry that several requests need at once is read once. Damage, I/O errors and deadlines end as
    :class:`~ragcachekit.store.loading.load.LoadFailed` for those who wait for the layer. Thread safe.

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
        Called with the speed of each read.
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
        self._queue = LoadQueue(store, observe, bytes_in_flight, threads, step)
        weakref.finalize(self, methodcaller("close", 0.0), self._queue)

    def open(self, key: KVKey, weight: float = 1.0) -> Hit | None:
        """What the store has, without reading its layers: :meth:`begin` does, for all of a prompt at once."""
        queue = self._queue
        with queue.changed:
            queue.sweep()
            load = queue.findable.get(key)
            handle = LoadingKV(load, self._deadline) if load is not None else None
            forgets = queue.forgets
        if handle is None:
            opened = queue.store.open(key, weight)
            if opened is None or isinstance(opened, Found):
                return Hit(opened.kv, opened.tier) if opened is not None else None
            if queue.pool.hopeless:
                opened.close()
                return None
            handle = queue.share(key, opened, lambda load: LoadingKV(load, self._deadline), forgets)
        return Hit(handle, handle.tier) if handle is not None else None

    def begin(self, handles: Iterable[LoadingKV]) -> None:
        """Read these for one request; those of earlier requests come first."""
        queue = self._queue
        with queue.changed:
            rank = next(queue.ranks)
            for handle in handles:
                load = handle.load
                load.rank = min(load.rank, rank)
                load.begun = load.begun or time.perf_counter()
                load.prefetched = False
                queue.unhold(load)
                handle.claimed()
            queue.wake()

    def release(self, handles: Iterable[LoadingKV]) -> None:
        """Close what was opened and is not needed; dropping a handle does the same with the next call."""
        with self._queue.changed:
            for handle in handles:
                handle.load.handles.discard(handle)
            self._queue.sweep()

    def prefetch(self, keys: Iterable[KVKey]) -> None:
        """Begin to load what a prompt may soon need, behind everything that a request waits for.

        The first prompt that needs such an entry takes it over. Any other ends in the store's faster
        tiers, where there are some, and is let go after a while.
        """
        queue = self._queue
        with queue.changed:
            if queue.closed:
                return
            queue.sweep()
            known = {*queue.findable, *queue.keys}
            queue.keys.extend(key for key in dict.fromkeys(keys) if key not in known)
            while len(queue.keys) > MOST_PREFETCHES:
                queue.keys.popleft()
            queue.wake()

    def forget(self, namespace: str, chunk_ids: frozenset[str] | None = None) -> None:
        """Hand nothing out any more that ``store.forget`` with the same arguments was about.

        Call it after that: what is opened in between would be handed out. Requests that have an entry
        already keep it, as they would keep what ``get`` returned.
        """
        queue = self._queue
        with queue.changed:
            queue.forgets += 1
            queue.drop(lambda key: concerns(key, namespace, chunk_ids))
            for load in queue.active:
                if concerns(load.key, namespace, chunk_ids):
                    queue.hide(load)

    def discard(self, key: KVKey) -> None:
        """Drop an unusable entry, from the store too."""
        queue = self._queue
        with queue.changed:
            queue.drop(lambda other: other == key)
            for load in [load for load in queue.active if load.key == key]:
                queue.hide(load)
        queue.store.discard(key)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until nothing is being read and no key waits for it; False if ``timeout`` did not suffice."""
        self.release(())
        return self._queue.changed.wait_for(self._queue.idle, timeout)

    def close(self) -> None:
        """Finish the reads in work, give the others up, end the threads."""
        self._queue.close()
