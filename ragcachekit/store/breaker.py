"""Leaving a service alone after failures in a row, or too many among its last answers.

Fifty lines of our own rather than pybreaker, which has no clock that tests can set and lets concurrent
callers all try at the same time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from threading import Lock

_MANY, _AMONG = 2, 4


class Breaker:
    """Closed: all may pass. Open: nobody; after ``cooldown`` seconds one may try.

    It opens after ``failures`` in a row, and when twice as many are among the last four times as many
    outcomes: a service that answers every other time costs nearly as much as a dead one.

    Parameters
    ----------
    failures : int
    cooldown : float
    clock : callable
        Seconds that only grow.
    """

    def __init__(self, failures: int, cooldown: float, clock: Callable[[], float] = time.monotonic) -> None:
        if failures < 1 or cooldown < 0:
            raise ValueError(f"failures must be >= 1 and cooldown >= 0, got {failures} and {cooldown}")
        self._limit, self._cooldown, self._clock = failures, cooldown, clock
        self._lock = Lock()
        self._row = 0
        self._last: deque[bool] = deque(maxlen=_AMONG * failures)
        self._failed = 0  # of the last ones
        self._until: float | None = None
        self._trying = False
        self.opened = 0
        """Times that it opened, or stayed open after a trial."""

    @property
    def is_open(self) -> bool:
        """Whether the last word was a failure too many."""
        return self._until is not None

    @property
    def ready(self) -> bool:
        """Whether :meth:`allow` would say yes now; asking changes nothing."""
        with self._lock:
            return self._until is None or not (self._trying or self._clock() < self._until)

    def allow(self) -> bool:
        """Whether an operation may pass; whoever may, has to :meth:`record` how it went."""
        with self._lock:
            if self._until is None:
                return True
            if self._trying or self._clock() < self._until:
                return False
            self._trying = True
            return True

    def record(self, success: bool) -> bool:
        """Hear how an operation went; True if that has just opened a closed breaker."""
        with self._lock:
            self._trying = False
            closed = self._until is None
            self._note(success)
            if success:
                self._until = None
                return False
            if closed and self._row < self._limit and self._failed < _MANY * self._limit:
                return False
            self._last.clear()
            self._failed = 0
            self._until = self._clock() + self._cooldown
            self.opened += 1
            return closed

    def _note(self, success: bool) -> None:
        self._row = 0 if success else self._row + 1
        if len(self._last) == self._last.maxlen:
            self._failed -= not self._last[0]
        self._last.append(success)
        self._failed += not success
