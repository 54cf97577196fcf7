"""Operations on a service that may hang: deadlines, a limit on hanging threads, a circuit breaker."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from threading import Lock
from typing import TypeVar

from ragcachekit.store.base import LookupBudget
from ragcachekit.threads import DaemonPool, Job, refuse_after_fork

log = logging.getLogger(__name__)

T = TypeVar("T")

FAILURES = 3
"""Failures in a row after which a service is not asked for a while."""

COOLDOWN = 5.0
"""Seconds until one operation tries again."""

THREADS = 16
"""Operations on one service that run or hang at the same time."""

PLAN_DEADLINES = 3
"""Deadlines of a service that the look-ups of one plan may take there."""


class Breaker:
    """A circuit breaker. Not pybreaker: it lets all concurrent callers make the trial call.

    After :data:`FAILURES` in a row it refuses calls; after :data:`COOLDOWN` seconds one may try.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        refuse_after_fork(self)
        self._failed = 0  # in a row
        self._retry_at = 0.0  # monotonic seconds

    def allow(self) -> bool:
        """Whether a call may pass; :meth:`record` must get its outcome."""
        with self._lock:
            if self._failed < FAILURES:
                return True
            if time.monotonic() < self._retry_at:
                return False
            self._retry_at = math.inf  # until the trial ends
            return True

    def record(self, success: bool) -> bool:
        """Count an outcome; True if it has just opened the breaker."""
        with self._lock:
            self._failed = 0 if success else self._failed + 1
            self._retry_at = time.monotonic() + COOLDOWN
            return self._failed == FAILURES


class DeadlineExecutor:
    """Runs operations in threads and waits for each until a deadline. Thread safe.

    While all :data:`THREADS` hang, operations are refused.

    Parameters
    ----------
    name : str
        Of the tier, for the log.
    deadline : float
        Seconds that :meth:`run` waits for an operation; > 0.

    Attributes
    ----------
    failure : str or None
        Why the last operation that was tried failed; None if it did not.
    """

    def __init__(self, name: str, deadline: float) -> None:
        self.deadline = deadline
        self.failure: str | None = None
        self._name = name
        self._breaker = Breaker()
        self._pool = DaemonPool(f"ragcachekit-{name}", THREADS)

    def run(self, operation: Callable[[], T], default: T, deadline: float | None = None) -> T:
        """What ``operation`` returns, or ``default`` if it raises, is late or is refused."""
        if self._pool.closed.is_set() or not self._breaker.allow():
            return default
        job = Job(operation)
        failure: str | None = "interrupted"
        try:
            failure = self._outcome(job, deadline or self.deadline)
        finally:
            self.failure = failure
            if self._breaker.record(failure is None):
                log.warning("%s tier: not used for a while after too many failures: %s", self._name, failure)
        return default if failure is not None else job.result

    def look(self, operation: Callable[[], T], default: T) -> T:
        """As :meth:`run`, but refused if the current plan has no whole deadline left for this service."""
        plan = LookupBudget.current()
        if plan is None:
            return self.run(operation, default)
        if plan.spent[self] > (PLAN_DEADLINES - 1) * self.deadline:
            return default
        started = time.monotonic()
        try:
            return self.run(operation, default)
        finally:
            plan.spent[self] += time.monotonic() - started

    def close(self) -> None:
        """Refuse further operations; does not wait."""
        self._pool.close(0.0)

    def _outcome(self, job: Job, deadline: float) -> str | None:
        """Run the job; why it failed, or None if it did not."""
        try:
            if not self._pool.submit(job):
                return "every thread hangs"
            self._pool.wait(job, deadline)
        finally:
            late = self._pool.give_up(job)  # also if interrupted: then it must not start later
        if late:
            return f"no answer within {deadline:g} s"
        return None if job.error is None else f"{type(job.error).__name__}: {job.error}"
