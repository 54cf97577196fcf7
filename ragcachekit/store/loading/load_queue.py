"""Entries that a loader reads and prefetches, and which of them is next."""

from __future__ import annotations

import itertools
import sys
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from ragcachekit.forks import refuse_after_fork
from ragcachekit.store.base import KVStore, LayerSource
from ragcachekit.store.loading.load import Load
from ragcachekit.threads import Condition, DaemonPool, Job
from ragcachekit.types import KVKey

if sys.platform != "win32":
    import resource

HOLD_SECONDS = 30.0
"""How long a prefetched entry waits for a prompt that needs it."""

SHARE_OF_FILES = 0.5
"""The part of the files that the process may open which a loader may use."""

MOST_STUCK = 4
"""Threads that may hang in a read (a mount that is gone) and be replaced."""

CLOSE_SECONDS = 5.0
"""How long closing waits for reads in work."""

Observe = Callable[[str, int, float, int], object]
"""Called after every read with its tier, bytes, seconds, and the bytes of other reads when it began."""

_Use = TypeVar("_Use")


class ReadJob(Job):
    """One step of a reader: the next layer of a load, or a key to prefetch.

    ``load`` is what it reads (None while it opens an entry), ``since`` when that began, by
    :func:`time.monotonic`.
    """

    load: Load | None = None
    since: float = float("inf")

    def __init__(self, queue: LoadQueue, step: Step) -> None:
        super().__init__(partial(step, queue, self))


Step = Callable[["LoadQueue", ReadJob], object]
"""What a reader job does."""


class LoadQueue:
    """Loads in work, keys to prefetch, and prefetched entries, shared by a loader and its reader jobs.

    The jobs hold no loader, so that one can be dropped unclosed. ``changed`` guards everything here and in
    the loads.
    """

    def __init__(self, store: KVStore, observe: Observe, room: int, threads: int, step: Step) -> None:
        self.store, self.observe = store, observe
        self._room, self._threads, self._step = room, threads, step
        self.pool = DaemonPool("ragcachekit-load", threads, MOST_STUCK)
        self.jobs: set[ReadJob] = set()  # that wait for a thread or run, without those that were given up
        self.changed = Condition()
        self.active: list[Load] = []  # opened and not yet read to their end
        self.findable: dict[KVKey, Load] = {}  # active ones that were not forgotten, and held ones
        # Prefetched, complete, and asked for by no prompt; the oldest first. (Not an OrderedDict: one whose
        # keys compare in Python is left damaged when that is interrupted.)
        self.held: dict[KVKey, Load] = {}
        self.keys: deque[KVKey] = deque()  # to be prefetched
        self.ranks = itertools.count()
        self.reading = self.opening = 0  # bytes of the reads in work, and prefetches that open an entry
        self.forgets = 0  # how often something was forgotten
        self.closed = False
        refuse_after_fork(self)

    def share(
        self, key: KVKey, source: LayerSource, use: Callable[[Load], _Use], forgets: int
    ) -> _Use | None:
        """``use`` of the load of ``key``: over ``source``, or the one that another thread opened meanwhile.

        ``use`` is called with the lock held, so that no load is swept away before it has a user. ``forgets``
        is the count before ``source`` was opened: if it changed since, no other request may find the load.
        """
        with self.changed:
            load = self.findable.get(key)
            if load is None and not self.closed and self._may_open():
                load = Load(key, source, self.changed, self.late)
                self.active.append(load)
                if forgets == self.forgets:
                    self.findable[key] = load
            used = use(load) if load is not None else None
        if load is None or load.source is not source:
            source.close()
        return used

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Give up all that is not being read, and wait for the reads in work but not for one that hangs."""
        with self.changed:
            self.closed = True
            for table in (self.keys, self.held, self.findable):
                table.clear()
            for load in self.active:
                load.error = load.error or "the store was closed"
            idle = [load for load in self.active if not load.busy]
            self.active.clear()
            self.changed.notify_all()
        for load in idle:
            load.source.close()
        self.pool.close(seconds)

    # -- the lock is held in all below ---------------------------------------------------------------

    def wake(self) -> None:
        """Have a job for each thing to do, as far as threads go; without any thread, give the loads up."""
        work = 0 if self.closed else len(self.begun()) + bool(self.keys or self.held)
        while len(self.jobs) < min(self._threads, work):
            job = ReadJob(self, self._step)
            if not self.pool.submit(job):
                break
            self.jobs.add(job)
        if self.pool.hopeless or (work and not self.jobs):
            self.keys.clear()
            for load in [load for load in self.begun() if not load.busy]:
                load.error = load.error or "there is no thread that could read it"
                self._end(load)
        self.changed.notify_all()

    def late(self, late: Load, seconds: float) -> None:
        """Replace the readers of ``late``, for which a request waited, and of all that takes ``seconds``."""
        old = time.monotonic() - seconds
        for job in [job for job in self.jobs if job.load is late or job.since <= old]:
            self.jobs.discard(job)
            self.pool.give_up(job)
            if job.load is not None:
                self.hide(job.load)  # the next request for it shall not wait for this read
        self.wake()

    def begun(self) -> list[Load]:
        """Loads that were asked to be read."""
        return [load for load in self.active if load.prefetched or load.rank < float("inf")]

    def next(self) -> Load | None:
        """The load to read a layer of: for the earliest request, the lowest layer."""
        ready = [load for load in self.begun() if not load.busy]
        return min(ready, key=lambda load: (load.prefetched, load.rank, load.read), default=None)

    def may_prefetch(self) -> bool:
        """Whether there is a key to prefetch, and room for its bytes."""
        return bool(self.keys) and not self.closed and self._prefetched_bytes() < self._room

    def idle(self) -> bool:
        """Whether nothing is read or opened, and no key is about to be."""
        return not (self.opening or self.may_prefetch() or self.begun())

    def drop(self, which: Callable[[KVKey], bool]) -> None:
        """Give up what was prefetched and no request has asked for."""
        kept = [key for key in self.keys if not which(key)]
        self.keys.clear()
        self.keys.extend(kept)
        for load in [load for load in self.held.values() if which(load.key)]:
            self.unhold(load)
        for load in self.active:
            load.prefetched = load.prefetched and not which(load.key)
        self.sweep()

    def unhold(self, load: Load) -> None:
        """Let a held load go."""
        if self.held.get(load.key) is load:
            self.hide(load)  # first: what is findable and not held would be overlooked when it is forgotten
            del self.held[load.key]

    def hide(self, load: Load) -> None:
        """Have no further request join a load."""
        if self.findable.get(load.key) is load:
            del self.findable[load.key]

    def sweep(self) -> None:
        """Let go of loads that nobody waits for, and of prefetched entries that are old or in the way."""
        old = time.perf_counter() - HOLD_SECONDS
        while self.held:
            first = next(iter(self.held.values()))
            if first.ended > old and not (self.keys and self._prefetched_bytes() >= self._room):
                break
            self.unhold(first)
        for load in [load for load in self.active if self._abandoned(load)]:
            self._end(load)

    def _prefetched_bytes(self) -> int:
        return sum(load.source.nbytes for load in (*self.active, *self.held.values()) if load.prefetched)

    def _abandoned(self, load: Load) -> bool:
        return load in self.active and not load.busy and not load.wanted

    def _may_open(self) -> bool:
        if len(self.active) >= most_open():
            self.sweep()
        return len(self.active) < most_open()

    def _end(self, load: Load) -> None:
        """Close a load; active up to the last step, so that an interrupted call leaves it to the next."""
        self.hide(load)
        load.source.close()
        self.active = [other for other in self.active if other is not load]


def most_open() -> float:
    """How many files a loader may have open."""
    if sys.platform == "win32":
        return 256
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return float("inf") if most == resource.RLIM_INFINITY else SHARE_OF_FILES * most
