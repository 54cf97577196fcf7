"""Background reads of entries in slow tiers: layer 0 of all entries first, then layer 1, and so on."""

from __future__ import annotations

import itertools
import logging
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

from ragcachekit.errors import Closed
from ragcachekit.store.base import Found, KVStore, LayerSource, concerns
from ragcachekit.store.entry import EntryDamaged
from ragcachekit.store.load import IDLE, PREFETCH, Hit, Load, LoadingKV
from ragcachekit.threads import Condition, DaemonPool, Job, refuse_after_fork
from ragcachekit.types import KVKey

if sys.platform != "win32":
    import resource

log = logging.getLogger(__name__)

THREADS = 2
DEADLINE_SECONDS = 30.0
BYTES_IN_FLIGHT = 1 << 30

SHARE_OF_FILES = 0.5
"""Part of the process's open files that a loader may use."""

MAX_STUCK = 4
"""Threads that may hang in a read (a dead mount) and be replaced."""

CLOSE_SECONDS = 5.0
"""How long closing waits for running reads."""

Observe = Callable[[str, int, float, int], object]
"""Called after every read with its tier, bytes, seconds, and the bytes of other reads when it began."""


class Loader:
    """Finds entries in a store and reads those of slow tiers in background threads. Thread safe.

    An entry that several requests need at once is read once. Damage, I/O errors and deadlines raise
    :class:`~ragcachekit.store.load.LoadFailed` where a request waits for the layer.

    Parameters
    ----------
    store : KVStore
    threads : int
        Reads at the same time.
    deadline : float
        Seconds that a request waits for an entry.
    bytes_in_flight : int
        Limit on bytes being prefetched; one entry may exceed it. Requests are not limited.
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
        self._store, self._observe = store, observe
        self._threads, self._deadline, self._most_prefetched = threads, deadline, bytes_in_flight
        self._pool = DaemonPool("ragcachekit-load", threads, MAX_STUCK)
        self._changed = Condition()  # guards everything below and in the loads
        self._jobs: set[Job] = set()  # submitted, not finished and not given up
        self._active: list[Load] = []  # opened and not read to the end
        self._findable: dict[KVKey, Load] = {}  # that another request may join: not those forgotten
        self._ranks = itertools.count()
        self._reading = 0  # bytes
        self._forgets = 0
        self._closed = False
        refuse_after_fork(self)

    def open(self, key: KVKey, weight: float = 1.0) -> Hit | None:
        """The entry in the store; its layers are read after :meth:`begin`, for a whole prompt at once."""
        with self._changed:
            self._sweep()
            load, forgets = self._findable.get(key), self._forgets
            if load is not None:
                return Hit(LoadingKV(load, self._deadline), load.source.tier)
        opened = self._store.open(key, weight)
        if opened is None or isinstance(opened, Found):
            return Hit(opened.kv, opened.tier) if opened is not None else None
        with self._changed:
            load = self._add(key, opened, forgets)
            return Hit(LoadingKV(load, self._deadline), load.source.tier) if load is not None else None

    def begin(self, handles: Iterable[LoadingKV]) -> None:
        """Read these for one request; those of earlier requests are read first."""
        with self._changed:
            rank = next(self._ranks)
            for handle in handles:
                handle.load.begin(rank)
                handle.start_deadline()
            self._wake()

    def release(self, handles: Iterable[LoadingKV]) -> None:
        """Close entries that a request does not need; dropping a handle does so at the next call."""
        with self._changed:
            for handle in handles:
                handle.load.handles.discard(handle)
            self._wake()

    def prefetch(self, keys: Iterable[KVKey]) -> None:
        """Copy entries into the store's faster tiers, after everything that a request waits for.

        Waits while ``bytes_in_flight`` are being prefetched. A prompt that needs an entry meanwhile joins in.
        """
        for key in keys:
            if not self._changed.wait_for(self._may_prefetch, self._deadline):
                return
            with self._changed:
                if self._closed:
                    return
                self._sweep()
                known, forgets = key in self._findable, self._forgets
            opened = None if known else self._store.open(key, 0.0)
            if opened is None or isinstance(opened, Found):
                continue
            with self._changed:
                load = self._add(key, opened, forgets)
                if load is not None:
                    load.begin(PREFETCH)
                self._wake()

    def coming(self, keys: Iterable[KVKey]) -> list[LoadingKV]:
        """Entries among ``keys`` that are being read now."""
        with self._changed:
            loads = [load for key in keys if (load := self._findable.get(key)) is not None]
            return [LoadingKV(load, self._deadline) for load in loads if load.rank != IDLE]

    def forget(self, namespace: str, chunk_ids: frozenset[str] | None = None) -> None:
        """Return nothing more of what ``store.forget`` with the same arguments dropped; call it after that.

        Requests that already have an entry finish with it.
        """
        self._drop(lambda key: concerns(key, namespace, chunk_ids))

    def discard(self, key: KVKey) -> None:
        """Drop an unusable entry, from the store too."""
        self._drop(lambda other: other == key)
        self._store.discard(key)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until nothing is being read; False if ``timeout`` seconds did not suffice."""
        self.release(())
        return self._changed.wait_for(lambda: not self._begun(), timeout)

    def close(self) -> None:
        """Cancel all reads, and wait for the running ones but not for one that hangs."""
        with suppress(Closed), self._changed:
            self._closed = True
            self._findable.clear()
            for load in self._active:
                load.error = load.error or "the store was closed"
                if load.job is None:
                    load.source.close()
            self._active.clear()
            self._changed.notify_all()
        self._pool.close(CLOSE_SECONDS)

    # -- reader jobs: the lock is not held ---------------------------------------------------------

    def _step(self, job: Job) -> None:
        """Read the most urgent layer."""
        with self._changed:
            self._sweep()
            load, beside = self._next(), self._reading
            if load is not None:
                load.job, load.job_begun = job, time.monotonic()
                self._reading += load.layer_bytes
        if load is not None:
            self._read(load, beside)
        with self._changed:
            self._jobs.discard(job)
            self._wake()

    def _read(self, load: Load, beside: int) -> None:
        begun = time.perf_counter()
        pair, error = None, None
        try:
            pair = load.source.layer(load.read)
        except (EntryDamaged, OSError) as failed:
            error = f"{type(failed).__name__}: {failed}"
        except Exception as failed:
            log.warning("reading an entry from tier %s failed", load.source.tier, exc_info=True)
            error = repr(failed)
        seconds = time.perf_counter() - begun
        with self._changed:
            self._reading -= load.layer_bytes
            if pair is not None:
                load.pairs[load.read] = pair
                load.read += 1
            load.error = load.error or error
            load.ended = time.perf_counter()
            over = load.complete or load.error is not None
            if not over:
                load.job = None  # another one may read the next layer
            self._changed.notify_all()
        if pair is not None:
            self._observe(load.source.tier, load.layer_bytes, seconds, beside)
        if over:
            self._finish(load)

    def _finish(self, load: Load) -> None:
        try:
            if load.complete:
                load.source.finished(load.kv())
        except Exception:
            log.warning("an entry could not be kept in a faster tier", exc_info=True)
        with self._changed:
            self._end(load)
            self._changed.notify_all()

    # -- the lock is held --------------------------------------------------------------------------

    def _add(self, key: KVKey, source: LayerSource, forgets: int) -> Load | None:
        """The load of ``key``: over ``source``, or the one that another thread opened meanwhile.

        If an entry was forgotten since ``forgets`` was read, no other request may join the load.
        """
        load = self._findable.get(key)
        usable = not (self._closed or self._pool.hopeless)
        if load is None and usable and len(self._active) < max_open():
            load = Load(key, source, self._changed, self._replace_readers)
            self._active.append(load)
            if forgets == self._forgets:
                self._findable[key] = load
        if load is None or load.source is not source:
            source.close()
        return load

    def _wake(self) -> None:
        """Submit jobs for what is to be done; without any thread, fail the loads."""
        self._sweep()
        work = 0 if self._closed else len(self._begun())
        while len(self._jobs) < min(self._threads, work) and self._submit():
            pass
        if self._pool.hopeless or (work and not self._jobs):
            for load in [load for load in self._begun() if load.job is None]:
                load.error = load.error or "there is no thread that could read it"
                self._end(load)
        self._changed.notify_all()

    def _submit(self) -> bool:
        job = Job(lambda: self._step(job))
        submitted = self._pool.submit(job)
        if submitted:
            self._jobs.add(job)
        return submitted

    def _replace_readers(self, late: Load, seconds: float) -> None:
        """Give up the job that reads ``late``, for which a request waited, and all that take ``seconds``."""
        old = time.monotonic() - seconds
        for load in self._active:
            job = load.job
            if job is not None and (load is late or load.job_begun <= old):
                self._jobs.discard(job)
                self._pool.give_up(job)
                self._hide(load)
        self._wake()

    def _begun(self) -> list[Load]:
        return [load for load in self._active if load.rank != IDLE]

    def _next(self) -> Load | None:
        """The load to read a layer of: of the earliest request, the one with the lowest layer."""
        ready = [load for load in self._begun() if load.job is None]
        return min(ready, key=lambda load: (load.rank, load.read), default=None)

    def _may_prefetch(self) -> bool:
        prefetched = sum(load.source.nbytes for load in self._active if load.rank == PREFETCH)
        return self._closed or prefetched < self._most_prefetched

    def _drop(self, which: Callable[[KVKey], bool]) -> None:
        """Stop what is prefetched, and have no further request join a load."""
        with self._changed:
            self._forgets += 1
            for load in [load for load in self._active if which(load.key)]:
                if load.rank == PREFETCH:
                    load.rank = IDLE
                self._hide(load)
            self._wake()

    def _hide(self, load: Load) -> None:
        """Have no further request join a load."""
        if self._findable.get(load.key) is load:
            del self._findable[load.key]

    def _sweep(self) -> None:
        """Close loads that no request has a handle of."""
        for load in list(self._active):
            if load.job is None and load.rank != PREFETCH and not load.handles:
                self._end(load)

    def _end(self, load: Load) -> None:
        self._hide(load)
        load.source.close()
        self._active = [other for other in self._active if other is not load]


def max_open() -> float:
    """Number of files that a loader may have open."""
    if sys.platform == "win32":
        return 256
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return float("inf") if most == resource.RLIM_INFINITY else SHARE_OF_FILES * most
