"""Operations on something that may hang: a deadline for each, and an end to asking after failures.

Threads of our own rather than a thread pool of the standard library: that one waits at the end of the
process for every thread, and a thread that hangs in a dead file system never ends.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from threading import Thread, current_thread
from typing import Any, TypeVar

from ragcachekit.store.breaker import Breaker
from ragcachekit.store.condition import Condition
from ragcachekit.store.patience import patience
from ragcachekit.store.process import PerProcess

_log = logging.getLogger(__name__)

IDLE_SECONDS = 0.5
"""How long a thread waits for more before it ends: a store that is dropped may never have been closed."""

T = TypeVar("T")


@dataclass(frozen=True)
class GuardStats:
    """What a guard has seen.

    Attributes
    ----------
    calls : int
        Operations asked for.
    timeouts, errors : int
        How many of them took too long, or raised.
    refused : int
        How many were not tried, because the breaker was open, every thread hung, or the plan that asked
        had waited enough.
    opened : int
        Times that the breaker opened.
    stuck : int
        Threads that still wait for an operation that was given up.
    is_open : bool
        Whether operations are refused at present.
    """

    calls: int
    timeouts: int
    errors: int
    refused: int
    opened: int
    stuck: int
    is_open: bool


class _Job:
    """An operation and what became of it. Guarded by the guard's condition.

    Not a :class:`concurrent.futures.Future`, whose locks an interrupt may leave locked.
    """

    def __init__(
        self, operation: Callable[[], Any], then: Callable[[BaseException | None], object] | None = None
    ) -> None:
        self.operation, self.then = operation, then
        self.begun = self.done = self.given_up = False
        self.result: Any = None
        self.error: BaseException | None = None


class Guard:
    """Runs operations in a few daemon threads, there while needed, and answers in time, whatever they do.

    An operation that is late is given up, not stopped: its thread goes on, and is replaced as long as
    there are no more than ``spares`` such threads. After that everything is refused at once. Operations
    therefore have to bear that nobody waits for them any more.

    Parameters
    ----------
    name : str
        For the log.
    deadline : float
        Seconds that :meth:`run` waits for an operation; > 0.
    failures, cooldown, clock
        As in :class:`~ragcachekit.store.breaker.Breaker`.
    workers : int
        Operations that run at the same time.
    spares : int
        Threads that may hang beyond those.
    """

    def __init__(
        self,
        name: str,
        deadline: float,
        *,
        failures: int = 3,
        cooldown: float = 5.0,
        workers: int = 4,
        spares: int = 12,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not deadline > 0:
            raise ValueError(f"the deadline must be > 0 seconds, got {deadline}")
        self.deadline = deadline
        self._name = name
        self._workers, self._spares = workers, spares
        self._breakers = PerProcess(lambda: Breaker(failures, cooldown, clock))
        self._counts = {"calls": 0, "timeouts": 0, "errors": 0, "refused": 0}
        self._closed = self._warned = False
        self._start()

    def run(self, operation: Callable[[], T], default: T, deadline: float | None = None) -> T:
        """What ``operation`` returns, or ``default`` if it raises, is late, or is not worth trying."""
        self._own()
        self._count("calls")
        # Not a success unless it returns: an interrupt while waiting must not leave a trial open for ever.
        failure: str | None = "interrupted"
        result = default
        try:
            if self._closed or not self._breaker.allow():
                failure = None
                self._count("refused")
            else:
                failure, result = self._outcome(operation, default, deadline or self.deadline)
        finally:
            if failure is not None:
                self._record(failure)
        return result

    def look(self, operation: Callable[[], T], default: T) -> T:
        """As :meth:`run`, and not tried if the plan that asks has waited enough here."""
        plan = patience()
        if plan is None:
            return self.run(operation, default)
        if not plan.lasts(self, self.deadline):
            self._own()
            self._count("calls")
            self._count("refused")
            return default
        with plan.spending(self):
            return self.run(operation, default)

    def post(self, operation: Callable[[], object]) -> bool:
        """Run ``operation`` behind the caller's back; False if it is not worth trying.

        It has to end by itself (give its sockets time-outs): nobody gives it up. What it raises is a
        failure like any other; after failures in a row others than it try first.
        """
        self._own()
        self._count("calls")
        if self._closed or self._breaker.is_open or not self._submit(_Job(operation, self._posted)):
            self._count("refused")
            return False
        return True

    @property
    def ready(self) -> bool:
        """Whether :meth:`run` would try an operation now."""
        return not self._closed and self._breaker.ready

    def stats(self) -> GuardStats:
        """Counts since it was made."""
        self._own()
        with self._ready:
            return GuardStats(
                **self._counts, opened=self._breaker.opened, stuck=self._stuck, is_open=self._breaker.is_open
            )

    def close(self) -> None:
        """Let idle threads end; further operations are refused."""
        self._closed = True
        self._own()
        with self._ready:
            self._ready.notify_all()

    @property
    def _breaker(self) -> Breaker:
        return self._breakers.get()

    def _own(self) -> None:
        """A fork took the threads away, and perhaps left the lock held: begin anew."""
        if self._pid != os.getpid():
            self._start()

    def _start(self) -> None:
        self._ready = Condition()
        self._jobs: deque[_Job] = deque()
        self._threads: set[Thread] = set()
        self._idle = self._stuck = 0
        self._pid = os.getpid()  # last: whoever sees it finds the rest

    def _count(self, event: str) -> None:
        with self._ready:
            self._counts[event] += 1

    def _outcome(self, operation: Callable[[], T], default: T, deadline: float) -> tuple[str, T]:
        """Why it failed (empty: it did not), and what to return."""
        job = _Job(operation)
        try:
            if not self._submit(job):
                self._count("refused")
                return "every thread hangs", default
            self._ready.wait_for(lambda: job.done, deadline)
        finally:
            late = self._give_up(job)
        if late:
            self._count("timeouts")
            return f"no answer within {deadline:g} s", default
        if job.error is None:
            return "", job.result
        self._count("errors")
        return f"{type(job.error).__name__}: {job.error}", default

    def _record(self, failure: str) -> None:
        if self._breaker.record(not failure):
            _log.warning("%s tier: left alone for a while after too many failures: %s", self._name, failure)

    def _posted(self, error: BaseException | None) -> None:
        if error is not None:
            self._count("errors")
        self._record("" if error is None else f"{type(error).__name__}: {error}")

    def _submit(self, job: _Job) -> bool:
        """Have it run; False if every thread hangs."""
        with self._ready:
            if self._idle <= len(self._jobs):
                self._add_thread()
            if len(self._threads) == self._stuck:
                return False
            self._jobs.append(job)
            self._ready.notify_all()
        return True

    def _add_thread(self) -> None:
        threads = len(self._threads)
        if threads - self._stuck >= self._workers or threads >= self._workers + self._spares:
            return
        thread = Thread(target=self._work, args=(self._ready,), name=f"ragcachekit-{self._name}", daemon=True)
        try:
            self._threads.add(thread)
            thread.start()
        except RuntimeError as error:
            self._threads.discard(thread)
            _log.warning("%s tier: no thread to be had: %s", self._name, error)
        except BaseException:  # interrupted: if it runs all the same, it adds itself
            self._threads.discard(thread)
            raise

    def _give_up(self, job: _Job) -> bool:
        """Stop waiting for a job; False if it is done."""
        with self._ready:
            if job.done or job.given_up:
                return not job.done
            job.given_up = True
            self._stuck += job.begun  # one that waits in the queue costs no thread
            return True

    def _work(self, ready: Condition) -> None:
        while (job := self._next(ready)) is not None:
            self._finish(job, ready)
            del job  # it may hold the last reference to a store: not while waiting

    def _next(self, ready: Condition) -> _Job | None:
        """The next job for the thread that asks; None if it is to end."""
        me = current_thread()
        while True:
            with ready:
                self._threads.add(me)
                # Asked before waiting, not after: a thread that was woken for a job has to take it.
                if len(self._threads) - self._stuck > self._workers:
                    self._threads.discard(me)
                    return None
                self._idle += 1
            woken = ready.wait_for(lambda: self._jobs or self._closed, IDLE_SECONDS)
            with ready:
                self._idle -= 1
                while self._jobs and not self._closed:
                    job = self._jobs.popleft()
                    if not job.given_up:
                        job.begun = True
                        return job
                if self._closed or not woken:
                    self._threads.discard(me)
                    return None

    def _finish(self, job: _Job, ready: Condition) -> None:
        result, raised = None, None
        try:
            result = job.operation()
        except BaseException as error:
            raised = error
        with ready:  # whoever gives a job up holds this too, so that it is either done or given up
            self._stuck -= job.given_up
            job.result, job.error, job.done = result, raised, True
            ready.notify_all()
        if job.then is not None:
            job.then(raised)
