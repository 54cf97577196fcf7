"""Background work: queues of jobs, and how they leave the processor to requests."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from functools import partial
from threading import Event, Lock
from typing import Any, Generic, TypeVar

from ragcachekit.cancellation import CancelScope, raise_if_cancelled
from ragcachekit.errors import Cancelled
from ragcachekit.threads import DaemonPool
from ragcachekit.threads import Job as PoolJob

log = logging.getLogger(__name__)

Job = TypeVar("Job")
Pause = Callable[[Event], Callable[[], object]]


class BackgroundWorker:
    """The background work of one engine: queues of jobs, each with a thread; ``closed`` is set by close."""

    def __init__(self) -> None:
        self.closed = Event()
        self._queues: list[JobQueue[Any]] = []

    def queue(self, work: Callable[[Job], object], most: int, pause: Pause | None = None) -> JobQueue[Job]:
        """A queue of at most ``most`` jobs, for each of which ``work`` is called; errors are logged.

        ``pause`` makes, for each job, what is called before every layer of its model work. That may delay the
        layer until the event is set, which it is given: the worker is closed.
        """
        queue = JobQueue(self.closed, work, most, pause)
        self._queues.append(queue)
        return queue

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until no job waits or runs; False if ``timeout`` seconds did not suffice."""
        return flush_all([queue.pool.flush for queue in self._queues], timeout)

    def close(self) -> None:
        """Cancel running jobs before their next layer, drop the rest; waits as :meth:`DaemonPool.close`."""
        self.closed.set()
        for queue in self._queues:
            queue.pool.close()


class JobQueue(Generic[Job]):
    """Jobs of one kind, done in order and one at a time; :meth:`BackgroundWorker.queue` makes it."""

    def __init__(self, closed: Event, work: Callable[[Job], object], most: int, pause: Pause | None) -> None:
        self.pool = DaemonPool("ragcachekit-background")
        self._closed, self._work, self._most, self._pause = closed, work, most, pause

    @property
    def waiting(self) -> int:
        """Jobs in the queue, without the running one."""
        return self.pool.waiting

    def submit(self, job: Job) -> bool:
        """Queue a job; False if the queue is full, there is no thread, or the worker is closed."""
        return self.pool.submit(PoolJob(partial(self._do, job)), self._most)

    def _do(self, job: Job) -> None:
        pause = None if self._pause is None else self._pause(self._closed)
        with CancelScope(self._closed, pause=pause):
            attempt(self._work, job)


def attempt(work: Callable[[Job], object], job: Job) -> None:
    """Do a job after an answer; errors are logged, except cancellation."""
    try:
        work(job)
    except Cancelled:
        pass
    except Exception:
        log.warning("a job after an answer failed", exc_info=True)


def flush_all(flushes: Iterable[Callable[[float | None], bool]], timeout: float | None) -> bool:
    """Flush all within ``timeout`` seconds; False if these did not suffice."""
    end = None if timeout is None else time.monotonic() + timeout
    done = [flush(None if end is None else max(0.0, end - time.monotonic())) for flush in flushes]
    return all(done)


# -- beside requests ------------------------------------------------------------------------------

_EVERY = 0.02  # seconds between two looks

SHARE = 0.1
"""Part of the time that background work gets while requests run: not none, under a load that never ends."""


class ActiveRequests:
    """A ``with`` block around every request counts it. Thread safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self.running = 0

    def __enter__(self) -> None:
        with self._lock:
            self.running += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self.running -= 1

    def wait_for_none(self, closed: Event) -> None:
        """Wait until no request runs; Cancelled once ``closed`` is set, or in a cancelled scope."""
        raise_if_cancelled()
        while self.running:
            if closed.wait(_EVERY):
                raise Cancelled("closed while waiting for requests")


class Backoff:
    """Slows one background job's model work down while requests run, to ``share`` of the time.

    It competes for the processor with the first token that somebody waits for. Called before every layer.
    ``active`` has the number of requests in ``running``.
    """

    def __init__(self, active: Any, closed: Event, share: float = SHARE) -> None:
        self._active, self._closed, self._share = active, closed, share
        self._since = time.monotonic()

    def __call__(self) -> None:
        """Wait until no request runs, a multiple of the time since the last call at most, or ``closed``."""
        now = time.monotonic()
        end = now + (now - self._since) * (1 / self._share - 1)
        while self._active.running and (left := end - time.monotonic()) > 0:
            if self._closed.wait(min(_EVERY, left)):
                break
        self._since = time.monotonic()
