"""The reader jobs of a :class:`ragcachekit.store.loader.Loader`, and others in place of those that hang."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from ragcachekit.store.loading import Load
from ragcachekit.threads import DaemonPool, Job

MOST_STUCK = 4
"""Threads that may hang in a read (a mount that is gone) and be replaced."""


class ReadJob(Job):
    """One step of a reader: the next layer of a load, or a key to prefetch.

    Attributes
    ----------
    load : Load or None
        What it reads; None before it begins, and while it opens an entry.
    since : float
        When that began, by :func:`time.monotonic`.
    """

    load: Load | None = None
    since: float = float("inf")

    def __init__(self, step: Callable[[ReadJob], object]) -> None:
        super().__init__(partial(step, self))

    def begins(self, load: Load | None) -> None:
        """Note that it reads ``load`` from now on, or opens an entry."""
        self.load, self.since = load, time.monotonic()


class ReaderPool:
    """As many reader jobs as there is work for; guarded by the load queue's lock.

    Parameters
    ----------
    threads : int
        Reads at the same time.
    step : callable
        What each job does, called with the job.

    Attributes
    ----------
    jobs : set of ReadJob
        Those that wait for a thread or run, without those that were given up.
    """

    def __init__(self, threads: int, step: Callable[[ReadJob], object]) -> None:
        self._threads, self._step = threads, step
        self.jobs: set[ReadJob] = set()
        self.pool = DaemonPool("ragcachekit-load", threads, MOST_STUCK)

    def fill(self, work: int) -> bool:
        """Have a job for each of ``work`` things to do, as far as threads go; False if none will run."""
        while len(self.jobs) < min(self._threads, work):
            job = ReadJob(self._step)
            if not self.pool.submit(job):
                break
            self.jobs.add(job)
        return not self.pool.hopeless and (bool(self.jobs) or not work)

    def give_up(self, late: Load, seconds: float) -> list[Load]:
        """Give up the jobs that read ``late``, or anything for ``seconds``; returns what these read."""
        old = time.monotonic() - seconds
        hanging = [job for job in self.jobs if job.load is late or job.since <= old]
        for job in hanging:
            self.jobs.discard(job)
            self.pool.give_up(job)
        return [job.load for job in hanging if job.load is not None]

    def close(self, seconds: float) -> None:
        """End the jobs; the lock is not held."""
        self.pool.close(seconds)
