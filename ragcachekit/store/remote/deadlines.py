"""Operations on a service that may hang: deadlines, a limit on hanging threads, a circuit breaker."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock
from typing import TypeVar

from ragcachekit.threads import DaemonPool, Job

_log = logging.getLogger(__name__)

T = TypeVar("T")


PLAN_DEADLINES = 3
"""Deadlines of a service that the look-ups of one plan may take there."""

# Not an argument of `open`: every store would have to pass it on, and only remote tiers need it.
_current: ContextVar[LookupBudget | None] = ContextVar("ragcachekit_lookup_budget", default=None)


class LookupBudget:
    """Seconds that one plan has waited for each service, by a monotonic ``clock``."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._spent: dict[object, float] = {}

    @contextmanager
    def held(self) -> Iterator[None]:
        """Count the look-ups of this thread inside the ``with`` block."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def lasts(self, service: object, deadline: float) -> bool:
        """Whether a whole deadline is left for another look-up."""
        return self._spent.get(service, 0.0) <= (PLAN_DEADLINES - 1) * deadline

    @contextmanager
    def spending(self, service: object) -> Iterator[None]:
        """Count the time of one look-up."""
        begun = self._clock()
        try:
            yield
        finally:
            self._spent[service] = self._spent.get(service, 0.0) + self._clock() - begun


class Breaker:
    """A circuit breaker. Not pybreaker: it lets all concurrent callers make the trial call.

    Closed: every call passes. Open: none does; after ``cooldown`` seconds one trial call may.

    It opens after ``failures`` in a row, and when ``2 * failures`` of the last ``4 * failures`` calls failed.
    ``cooldown`` and ``clock`` are in seconds.
    """

    def __init__(self, failures: int, cooldown: float, clock: Callable[[], float] = time.monotonic) -> None:
        if failures < 1 or cooldown < 0:
            raise ValueError(f"failures must be >= 1 and cooldown >= 0, got {failures} and {cooldown}")
        self._failures, self._cooldown, self._clock = failures, cooldown, clock
        self._lock = Lock()
        self._in_a_row = 0
        self._recent: deque[bool] = deque(maxlen=4 * failures)
        self._open_until: float | None = None
        self._on_trial = False

    @property
    def is_open(self) -> bool:
        """Whether calls other than trials are refused."""
        return self._open_until is not None

    def allow(self) -> bool:
        """Whether a call may pass; :meth:`record` must get its outcome."""
        with self._lock:
            if self._open_until is None:
                return True
            if self._on_trial or self._clock() < self._open_until:
                return False
            self._on_trial = True
            return True

    def record(self, success: bool) -> bool:
        """Count an outcome; True if it has just opened a closed breaker."""
        with self._lock:
            was_open, self._on_trial = self.is_open, False
            self._recent.append(success)
            self._in_a_row = 0 if success else self._in_a_row + 1
            if success:
                self._open_until = None
                return False
            failed = self._recent.count(False)
            if not was_open and self._in_a_row < self._failures and failed < 2 * self._failures:
                return False
            self._recent.clear()
            self._open_until = self._clock() + self._cooldown
            return not was_open


class DeadlineExecutor:
    """Runs operations in threads and waits for each until a deadline. Thread safe.

    Parameters
    ----------
    name : str
        Of the tier, for the log.
    deadline : float
        Seconds that :meth:`run` waits for an operation; > 0.
    failures, cooldown, clock
        As in :class:`Breaker`.
    threads : int
        Operations that run or hang at the same time. Others wait within their deadline, and are refused
        while all threads hang.
    """

    def __init__(
        self,
        name: str,
        deadline: float,
        *,
        failures: int = 3,
        cooldown: float = 5.0,
        threads: int = 16,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not deadline > 0:
            raise ValueError(f"the deadline must be > 0 seconds, got {deadline}")
        self.deadline = deadline
        self._name = name
        self._breaker = Breaker(failures, cooldown, clock)
        self._pool = DaemonPool(f"ragcachekit-{name}", threads)
        self.counts = Counter[str]()  # calls, and of them timeouts, errors and refused
        self._lock = Lock()  # around the counts

    def run(self, operation: Callable[[], T], default: T, deadline: float | None = None) -> T:
        """What ``operation`` returns, or ``default`` if it raises, is late or is refused."""
        self._count("calls")
        if self._pool.closed.is_set() or not self._breaker.allow():
            self._count("refused")
            return default
        failure, result = "interrupted", default  # not a success unless it returns
        try:
            failure, result = self._outcome(operation, default, deadline or self.deadline)
        finally:
            if self._breaker.record(not failure):
                _log.warning("%s tier: not used for a while after too many failures: %s", self._name, failure)
        return result

    def look(self, operation: Callable[[], T], default: T) -> T:
        """As :meth:`run`, but refused if the current plan has waited long enough for this service."""
        plan = _current.get()
        if plan is None:
            return self.run(operation, default)
        if not plan.lasts(self, self.deadline):
            self._count("calls")
            self._count("refused")
            return default
        with plan.spending(self):
            return self.run(operation, default)

    @property
    def stuck(self) -> int:
        """Threads that hang in operations whose callers have given up."""
        return self._pool.stuck

    @property
    def is_open(self) -> bool:
        """Whether operations are refused after too many failures."""
        return self._breaker.is_open

    def close(self) -> None:
        """Refuse further operations; does not wait."""
        self._pool.close(0.0)

    def _count(self, event: str) -> None:
        with self._lock:
            self.counts[event] += 1

    def _outcome(self, operation: Callable[[], T], default: T, deadline: float) -> tuple[str, T]:
        """Why the operation failed (empty: it did not), and the result."""
        job = Job(operation)
        try:
            if not self._pool.submit(job):
                self._count("refused")
                return "every thread hangs", default
            self._pool.wait(job, deadline)
        finally:
            late = self._pool.give_up(job)  # also if interrupted: then it must not begin later
        if late:
            self._count("timeouts")
            return f"no answer within {deadline:g} s", default
        if job.error is not None:
            self._count("errors")
            return f"{type(job.error).__name__}: {job.error}", default
        return "", job.result
