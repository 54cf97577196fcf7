"""Daemon threads, background jobs, and an interruptible condition variable.

Not ``concurrent.futures``: its executors wait at exit even for threads in a dead file system, and Ctrl-C may
leave the locks of its futures held.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from _thread import RLock
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from itertools import repeat
from threading import TIMEOUT_MAX, Event, Lock, Thread, current_thread, main_thread
from typing import Any, Generic, TypeVar

from ragcachekit.cancellation import CancelScope
from ragcachekit.errors import Cancelled, Closed

T = TypeVar("T")

log = logging.getLogger(__name__)

IDLE_SECONDS = 0.5
"""How long a thread waits for another job before it ends."""

END_SECONDS = 10.0
"""How long closing and the end of the process wait for running jobs."""

OPENED_BEFORE_FORK = "opened in another process: open it again after the fork"


class Condition(RLock):  # type: ignore[misc] # its stub calls it final, which it is not
    """As :class:`threading.Condition`, but Ctrl-C cannot leave it locked or release it twice.

    It is entered and left in one C call each, and waiting begins and ends without the lock. In a forked
    child, where the thread that holds it may be gone, waiting raises Closed.
    """

    def __init__(self) -> None:
        super().__init__()
        self._waiters: deque[Any] = deque()
        self.process = os.getpid()

    def check_process(self) -> None:
        """Raise :class:`~ragcachekit.errors.Closed` in a forked child; before its lock is taken."""
        if self.process != os.getpid():
            raise Closed(OPENED_BEFORE_FORK)

    def wait_for(self, predicate: Callable[[], object], timeout: float | None = None) -> bool:
        """Wait until ``predicate`` is true; False if ``timeout`` seconds did not suffice.

        Called without the lock; the predicate runs with it, and may be false again on return.
        """
        self.check_process()
        end = time.monotonic() + min(TIMEOUT_MAX, timeout if timeout is not None else TIMEOUT_MAX)
        while True:
            woken = Lock()
            with self:
                if predicate():
                    return True
                woken.acquire()
                self._waiters.append(woken)
            left = end - time.monotonic()
            if left <= 0 or not woken.acquire(timeout=min(left, TIMEOUT_MAX)):
                with self:
                    return bool(predicate())

    def notify_all(self) -> None:
        """Wake all waiting threads; the lock is held."""
        if self._waiters:  # in one call: interrupts come between calls
            taken = map(deque.popleft, repeat(self._waiters, len(self._waiters)))
            deque(map(_RELEASE, taken), maxlen=0)


_RELEASE = type(Lock()).release


class Job:
    """One call in a pool, guarded by the pool's lock, and its ``result`` or ``error`` once it is done."""

    def __init__(self, work: Callable[[], object]) -> None:
        self.work = work
        self.begun = self.done = self.given_up = False
        self.result: Any = None
        self.error: BaseException | None = None


class DaemonPool:
    """Threads that start when there is a job, and end when idle or with the process.

    A job that hangs can be given up: then nobody waits for it. :meth:`close` sets ``closed`` before it waits,
    so that long jobs can end early.

    Parameters
    ----------
    name : str
        Of the threads.
    threads : int
        Jobs that run at the same time. With one thread, jobs run in the order of submission.
    """

    def __init__(self, name: str, threads: int = 1) -> None:
        self.closed = Event()
        self._name, self._max = name, threads
        self._changed = Condition()
        self._waiting: deque[Job] = deque()
        self._running: dict[Thread, Job] = {}
        self._threads: set[Thread] = set()
        _POOLS.add(self)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def stuck(self) -> int:
        """Number of threads in jobs that were given up."""
        return sum(job.given_up for job in list(self._running.values()))

    def submit(self, job: Job, max_waiting: int | None = None) -> bool:
        """Queue a job. False after :meth:`close`, if ``max_waiting`` wait, or if no thread can run it."""
        self._changed.check_process()
        with self._changed:
            if self.closed.is_set() or (max_waiting is not None and len(self._waiting) >= max_waiting):
                return False
            self._grow()
            if len(self._threads) <= self.stuck:
                return False
            self._waiting.append(job)
            self._changed.notify_all()
        return True

    def wait(self, job: Job, timeout: float | None = None) -> bool:
        """Whether the job was done within ``timeout`` seconds."""
        self._changed.wait_for(lambda: job.done or (self.closed.is_set() and not job.begun), timeout)
        return job.done

    def give_up(self, job: Job) -> bool:
        """Abandon a job: it never begins, or nobody waits for its end. False if it is done."""
        self._changed.check_process()
        with self._changed:
            job.given_up = not job.done
            return job.given_up

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until no job waits or runs; False if ``timeout`` seconds did not suffice."""
        return self._changed.wait_for(lambda: not self._waiting and not self._running, timeout)

    def close(self, seconds: float | None = None) -> None:
        """Drop the queued jobs, and wait for the running ones, by default :data:`END_SECONDS`."""
        seconds = END_SECONDS if seconds is None else seconds
        if self._changed.process != os.getpid():
            return  # the parent closes it
        self.closed.set()
        with self._changed:
            dropped, self._waiting = self._waiting, deque()  # released with no lock held: they may own stores
            self._changed.notify_all()
            stuck = {thread for thread, job in self._running.items() if job.given_up}
            threads = self._threads - stuck - {current_thread()}
        end = time.monotonic() + seconds
        for thread in threads:
            with suppress(RuntimeError):  # not started yet: it ends at once
                thread.join(max(0.0, end - time.monotonic()))
        if seconds and any(thread.is_alive() for thread in threads):
            log.warning("%s has not ended within %g s; not waited for any longer", self._name, seconds)
        del dropped

    def _grow(self) -> None:
        """Start a thread if the idle ones do not suffice for the queue and one more job."""
        idle = len(self._threads) - len(self._running)
        if len(self._threads) >= self._max or idle > len(self._waiting):
            return
        thread = Thread(target=self._serve, name=self._name, daemon=True)
        try:
            self._threads.add(thread)
            thread.start()
        except RuntimeError as error:
            self._threads.discard(thread)
            log.warning("%s: could not start a thread: %s", self._name, error)
        except BaseException:  # interrupted: if it runs all the same, it adds itself
            self._threads.discard(thread)
            raise

    def _serve(self) -> None:
        me = current_thread()
        while (job := self._next(me)) is not None:
            result, raised = None, None
            try:
                result = job.work()
            except BaseException as error:
                raised = error
            del job.work  # it may hold KV, which nobody needs once the job is done
            with self._changed:  # a job is either done or given up
                job.result, job.error, job.done = result, raised, True
                self._running.pop(me, None)
                self._changed.notify_all()
            del job, result, raised  # the last reference to a store may be among them

    def _next(self, me: Thread) -> Job | None:
        """The next job for this thread, or None to end."""
        with self._changed:
            self._threads.add(me)
        self._changed.wait_for(lambda: self._waiting or self.closed.is_set(), IDLE_SECONDS)
        with self._changed:
            while self._waiting:
                job = self._waiting.popleft()
                if not job.given_up:
                    job.begun = True
                    self._running[me] = job
                    return job
            self._threads.discard(me)
            return None


_POOLS: weakref.WeakSet[DaemonPool] = weakref.WeakSet()


def _close_all() -> None:
    """Wait for running jobs: an interpreter that ends with a thread inside a model or a store may crash."""
    end = time.monotonic() + END_SECONDS
    for pool in list(_POOLS):
        pool.close(0.0)
    for pool in list(_POOLS):
        pool.close(max(0.0, end - time.monotonic()))


weakref.finalize(_POOLS, _close_all)  # at exit, and after all finalizers that were made later


# -- background work -------------------------------------------------------------------------------

Pause = Callable[[Event], Callable[[], object]]


class BackgroundWorker:
    """The background work of one engine: queues of jobs, each with a thread; ``closed`` is set by close."""

    def __init__(self) -> None:
        self.closed = Event()
        self._queues: list[JobQueue[Any]] = []

    def queue(self, work: Callable[[T], object], most: int, pause: Pause | None = None) -> JobQueue[T]:
        """A queue of at most ``most`` jobs, for each of which ``work`` is called; errors are logged.

        ``pause`` makes, for each job, what is called before every layer of its model work. That may delay the
        layer until the event is set, which it is given: the worker is closed.
        """

        def run(job: T) -> None:
            with CancelScope(self.closed, pause=None if pause is None else pause(self.closed)):
                attempt(work, job)

        self._queues.append(queue := JobQueue(run, most))
        return queue

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until no job waits or runs; False if ``timeout`` seconds did not suffice."""
        return flush_all([queue.flush for queue in self._queues], timeout)

    def close(self) -> None:
        """Cancel running jobs before their next layer, drop the rest; waits as :meth:`DaemonPool.close`."""
        self.closed.set()
        for queue in self._queues:
            queue.close()


class JobQueue(DaemonPool, Generic[T]):
    """Jobs of one kind, done in order and one at a time; :meth:`BackgroundWorker.queue` makes it."""

    def __init__(self, run: Callable[[T], object], most: int) -> None:
        super().__init__("ragcachekit-background")
        self._run, self._most = run, most

    def add(self, job: T) -> bool:
        """Queue a job; False if the queue is full, there is no thread, or the worker is closed."""
        return self.submit(Job(partial(self._run, job)), self._most)


def attempt(call: Callable[..., object], *arguments: object) -> object:
    """Call a user's code, or a job after an answer. Errors are logged, except cancellation.

    What a signal raises in the main thread is raised.
    """
    try:
        return call(*arguments)
    except Cancelled:
        return None
    except BaseException as error:
        if not isinstance(error, Exception) and current_thread() is main_thread():
            raise
        log.warning("a callback or a background job failed", exc_info=True)
        return None


def flush_all(flushes: Iterable[Callable[[float | None], bool]], timeout: float | None) -> bool:
    """Flush all within ``timeout`` seconds; False if these did not suffice."""
    end = None if timeout is None else time.monotonic() + timeout
    done = [flush(None if end is None else max(0.0, end - time.monotonic())) for flush in flushes]
    return all(done)
