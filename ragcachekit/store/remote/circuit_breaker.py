"""A circuit breaker. Not pybreaker: it lets all concurrent callers make the trial call."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from threading import Lock


class Breaker:
    """Closed: every call passes. Open: none does; after ``cooldown`` seconds one trial call may.

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
