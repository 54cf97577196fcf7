"""Background reads of entries in slow tiers: layer 0 of all entries first, then layer 1, and so on."""

from __future__ import annotations

import itertools
import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

from ragcachekit.forks import refuse_after_fork
from ragcachekit.store.base import Found, KVStore, LayerSource, concerns
from ragcachekit.store.entry.header import EntryDamaged
from ragcachekit.store.loading.load import Hit, Load, LoadingKV
from ragcachekit.threads import Condition, DaemonPool, Job
from ragcachekit.types import KVKey

if sys.platform != "win32":
    import resource

log = logging.getLogger(__name__)

THREADS = 2
DEADLINE_SECONDS = 30.0
BYTES_IN_FLIGHT = 1 << 30

MOST_PREFETCHES = 1024
"""Keys that may wait to be prefetched; the oldest are dropped first."""

HOLD_SECONDS = 30.0
"""How long a prefetched entry waits for a prompt that needs it."""

SHARE_OF_FILES = 0.5
"""Part of the process's open files that a loader may use."""

MOST_STUCK = 4
"""Threads that may hang in a read (a dead mount) and be replaced."""

CLOSE_SECONDS = 5.0
"""How long closing waits for running reads."""

Observe = Callable[[str, int, float, int], object]
"""Called after every read with its tier, bytes, seconds, and the bytes of other reads when it began."""


class _ReadJob(Job):
    """A read of one layer of ``load``, or the opening of a prefetched entry, since ``since`` (monotonic)."""

    load: Load | None = None
    since: float = float("inf")

    def __init__(self, step: Callable[[_ReadJob], object]) -> None:
        super().__init__(partial(step, self))


class Loader:
    """Finds entries in a store and reads those of slow tiers in background threads. Thread safe.

    An entry that several requests need at once is read once. Damage, I/O errors and deadlines raise
    :class:`~ragcachekit.store.loading.load.LoadFailed` where a request waits for the layer.

    Parameters
    ----------
    store : KVStore
    threads : int
        Reads at the same time.
    deadline : float
        Seconds that a request waits for an entry.
    bytes_in_flight : int
        Limit on bytes prefetched ahead of prompts; one entry may exceed it. Requests are not limited.
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
        self._pool = DaemonPool("ragcachekit-load", threads, MOST_STUCK)
        self._changed = Condition()  # guards everything below and in the loads
        self._jobs: set[_ReadJob] = set()  # submitted, not finished and not given up
        self._active: list[Load] = []  # opened and not read to the end
        self._findable: dict[KVKey, Load] = {}  # that another request may join: not those forgotten
        # Prefetched and complete, the oldest first. Not an OrderedDict: an interrupt would damage it.
        self._held: dict[KVKey, Load] = {}
        self._keys: deque[KVKey] = deque()  # to be prefetched
        self._ranks = itertools.count()
        self._reading = self._opening = 0  # bytes being read, and prefetched entries being opened
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
                load = handle.load
                load.rank = min(load.rank, rank)
                load.begun = load.begun or time.perf_counter()
                load.prefetched = False
                self._unhold(load)
                handle.start_deadline()
            self._wake()

    def release(self, handles: Iterable[LoadingKV]) -> None:
        """Close entries that a request does not need; dropping a handle does so at the next call."""
        with self._changed:
            for handle in handles:
                handle.load.handles.discard(handle)
            self._wake()

    def prefetch(self, keys: Iterable[KVKey]) -> None:
        """Read entries that a prompt may soon need, after everything that a request waits for.

        The first prompt that needs an entry takes it over. An unused one stays in the store's faster tiers,
        if there are any, and is dropped here after :data:`HOLD_SECONDS`.
        """
        with self._changed:
            if self._closed:
                return
            self._sweep()
            known = {*self._findable, *self._keys}
            self._keys.extend(key for key in dict.fromkeys(keys) if key not in known)
            while len(self._keys) > MOST_PREFETCHES:
                self._keys.popleft()
            self._wake()

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
        """Wait until nothing is being read or prefetched; False if ``timeout`` seconds did not suffice."""
        self.release(())
        return self._changed.wait_for(
            lambda: not (self._opening or self._may_prefetch() or self._begun()), timeout
        )

    def close(self) -> None:
        """Cancel all reads, and wait for the running ones but not for one that hangs."""
        with self._changed:
            self._closed = True
            for table in (self._keys, self._held, self._findable):
                table.clear()
            for load in self._active:
                load.error = load.error or "the store was closed"
                if not load.busy:
                    load.source.close()
            self._active.clear()
            self._changed.notify_all()
        self._pool.close(CLOSE_SECONDS)

    # -- reader jobs: the lock is not held ---------------------------------------------------------

    def _step(self, job: _ReadJob) -> None:
        """Read the most urgent layer, or prefetch the next key."""
        beside, key = 0, None
        with self._changed:
            self._jobs.add(job)  # an interrupted submit may have missed that
            self._sweep()
            load = self._next()
            if load is not None:
                load.busy = True
                beside, self._reading = self._reading, self._reading + load.read_bytes
            elif self._may_prefetch():
                key = self._keys.popleft()
                self._opening += 1
            job.load, job.since = load, time.monotonic()
        if load is not None:
            self._read(load, beside)
        elif key is not None:
            self._open_prefetched(key)
        with self._changed:
            self._opening -= key is not None
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
            self._reading -= load.read_bytes
            if pair is not None:
                load.pairs[load.read] = pair
                load.read += 1
            load.error = load.error or error
            load.ended = time.perf_counter()
            load.busy = over = load.complete or load.error is not None  # no other job continues it
            self._changed.notify_all()
        if pair is not None:
            self._observe(load.source.tier, load.read_bytes, seconds, beside)
        if over:
            self._finish(load)

    def _finish(self, load: Load) -> None:
        try:
            if load.complete:
                load.source.finished(load.kv())
        except Exception:
            log.warning("an entry could not be kept in a faster tier", exc_info=True)
        load.source.close()
        with self._changed:
            self._active = [other for other in self._active if other is not load]
            if load.prefetched and load.complete and self._findable.get(load.key) is load:
                self._held[load.key] = load
            else:
                self._hide(load)
            self._changed.notify_all()

    def _open_prefetched(self, key: KVKey) -> None:
        forgets = self._forgets
        try:
            opened = self._store.open(key, 0.0)
            if opened is None or isinstance(opened, Found):
                return
            with self._changed:
                load = self._add(key, opened, forgets)
                if load is not None:
                    load.prefetched = not load.handles  # else a request has opened it meanwhile
                    load.begun = load.begun or time.perf_counter()
        except Exception:
            log.warning("an entry could not be prefetched", exc_info=True)

    # -- the lock is held --------------------------------------------------------------------------

    def _add(self, key: KVKey, source: LayerSource, forgets: int) -> Load | None:
        """The load of ``key``: over ``source``, or the one that another thread opened meanwhile.

        If an entry was forgotten since ``forgets`` was read, no other request may join the load.
        """
        load = self._findable.get(key)
        usable = not (self._closed or self._pool.hopeless)
        if load is None and usable and len(self._active) < most_open():
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
        work = 0 if self._closed else len(self._begun()) + self._may_prefetch()
        while len(self._jobs) < min(self._threads, work):
            job = _ReadJob(self._step)
            if not self._pool.submit(job):
                break
            self._jobs.add(job)
        if self._pool.hopeless or (work and not self._jobs):
            self._keys.clear()
            for load in [load for load in self._begun() if not load.busy]:
                load.error = load.error or "there is no thread that could read it"
                self._end(load)
        self._changed.notify_all()

    def _replace_readers(self, late: Load, seconds: float) -> None:
        """Give up the job that reads ``late``, for which a request waited, and all that take ``seconds``."""
        old = time.monotonic() - seconds
        for job in [job for job in self._jobs if job.load is late or job.since <= old]:
            self._jobs.discard(job)
            self._pool.give_up(job)
            if job.load is not None:
                self._hide(job.load)
        self._wake()

    def _begun(self) -> list[Load]:
        return [load for load in self._active if load.prefetched or load.rank < float("inf")]

    def _next(self) -> Load | None:
        """The load to read a layer of: of the earliest request, the one with the lowest layer."""
        ready = [load for load in self._begun() if not load.busy]
        return min(ready, key=lambda load: (load.prefetched, load.rank, load.read), default=None)

    def _may_prefetch(self) -> bool:
        return bool(self._keys) and self._prefetched_bytes() < self._most_prefetched

    def _prefetched_bytes(self) -> int:
        return sum(load.source.nbytes for load in (*self._active, *self._held.values()) if load.prefetched)

    def _drop(self, which: Callable[[KVKey], bool]) -> None:
        """Drop what was prefetched, and have no further request join a load."""
        with self._changed:
            self._forgets += 1
            self._keys = deque(key for key in self._keys if not which(key))
            for load in [load for load in self._held.values() if which(load.key)]:
                self._unhold(load)
            for load in [load for load in self._active if which(load.key)]:
                load.prefetched = False
                self._hide(load)
            self._wake()

    def _unhold(self, load: Load) -> None:
        if self._held.get(load.key) is load:
            self._hide(load)  # first: a forget overlooks what is findable and not held
            del self._held[load.key]

    def _hide(self, load: Load) -> None:
        """Have no further request join a load."""
        if self._findable.get(load.key) is load:
            del self._findable[load.key]

    def _sweep(self) -> None:
        """Drop loads without handles, and prefetched entries that are old or take the place of new ones."""
        old = time.perf_counter() - HOLD_SECONDS
        while self._held:
            first = next(iter(self._held.values()))
            if first.ended > old and not (self._keys and not self._may_prefetch()):
                break
            self._unhold(first)
        for load in [load for load in self._active if not (load.busy or load.prefetched or load.handles)]:
            self._end(load)

    def _end(self, load: Load) -> None:
        """Close a load; it stays active up to the last step, so that an interrupted call is repeated."""
        self._hide(load)
        load.source.close()
        self._active = [other for other in self._active if other is not load]


def most_open() -> float:
    """Number of files that a loader may have open."""
    if sys.platform == "win32":
        return 256
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return float("inf") if most == resource.RLIM_INFINITY else SHARE_OF_FILES * most
