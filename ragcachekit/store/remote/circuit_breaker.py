"""A circuit breaker: a service that keeps failing is left alone for a while.

Written here rather than taken from pybreaker, which has no clock that tests can set and lets concurrent
callers all make the trial call.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from threading import Lock


class Breaker:
    """Closed: every call passes. Open: none does; after ``cooldown`` seconds one trial call may.

    It opens after ``failures`` in a row, and when ``2 * failures`` of the last ``4 * failures`` calls failed:
    a service that answers every other call costs nearly as much as a dead one.

    Parameters
    ----------
    failures : int
    cooldown : float
        Seconds.
    clock : callable
        Monotonic seconds.
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
        self.opened = 0
        """Times that it opened, or stayed open after a trial."""

    @property
    def is_open(self) -> bool:
        """Whether calls are refused, but for trials."""
        return self._open_until is not None

    def allow(self) -> bool:
        """Whether a call may pass; the outcome of one that may has to be passed to :meth:`record`."""
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
            self.opened += 1
            return not was_open
