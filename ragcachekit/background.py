"""Jobs behind the answers, one at a time: encoding into the tree, shadow prefills, prefetching."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Generic, TypeVar

from ragcachekit.cancellation import CancelScope
from ragcachekit.errors import Cancelled
from ragcachekit.threads import DaemonPool
from ragcachekit.threads import Job as PoolJob

log = logging.getLogger(__name__)

Job = TypeVar("Job")


class Background(Generic[Job]):
    """A bounded queue of jobs and the thread that does them.

    Parameters
    ----------
    work : callable
        Does one job; what it raises is logged.
    most : int
        Jobs that may wait.
    name : str
        Of the thread.
    """

    def __init__(self, work: Callable[[Job], object], most: int, name: str) -> None:
        self._work, self._most = work, most
        self._pool = DaemonPool(name)

    @property
    def waiting(self) -> int:
        """Jobs in the queue, without the one in work."""
        return self._pool.waiting

    def submit(self, job: Job) -> bool:
        """Queue a job; False if there is no room or no thread for it, or after :meth:`close`."""
        return self._pool.submit(PoolJob(partial(self._do, job)), self._most)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until nothing waits or is in work; False if ``timeout`` seconds did not suffice."""
        return self._pool.flush(timeout)

    def close(self) -> None:
        """End the job in work, drop the rest, end the thread.

        A forward of the job ends before its next layer; anything else is finished. A job that takes longer
        than :data:`ragcachekit.threads.END_SECONDS` is left to itself.
        """
        self._pool.close()

    def _do(self, job: Job) -> None:
        with CancelScope(self._pool.closed):
            attempt(self._work, job)


def attempt(work: Callable[[Job], object], job: Job) -> None:
    """Do a job; what it raises is logged, as the answer that it comes behind is there already.

    A job that was cancelled has not failed: its result is computed again when it is needed.
    """
    try:
        work(job)
    except Cancelled:
        pass
    except Exception:
        log.warning("a job behind an answer failed", exc_info=True)


def flush_all(flushes: Iterable[Callable[[float | None], bool]], timeout: float | None) -> bool:
    """Flush one after the other, all within ``timeout`` seconds; False if these did not suffice for one."""
    end = None if timeout is None else time.monotonic() + timeout
    done = [flush(None if end is None else max(0.0, end - time.monotonic())) for flush in flushes]
    return all(done)
