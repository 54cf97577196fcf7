"""Operations on a service that may hang: deadlines, a limit on hanging threads, a circuit breaker."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from threading import Lock
from typing import TypeVar

from ragcachekit.store.remote.circuit_breaker import Breaker
from ragcachekit.store.remote.lookup_budget import lookup_budget
from ragcachekit.threads import DaemonPool, Job

_log = logging.getLogger(__name__)

T = TypeVar("T")


class DeadlineExecutor:
    """Runs operations in threads and waits for each until a deadline. Thread safe.

    Parameters
    ----------
    name : str
        Of the tier, for the log.
    deadline : float
        Seconds that :meth:`run` waits for an operation; > 0.
    failures, cooldown, clock
        As in :class:`~ragcachekit.store.remote.circuit_breaker.Breaker`.
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
        plan = lookup_budget()
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
