"""How long one plan waits for the services behind its store, all of its look-ups together."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

PLAN_DEADLINES = 3
"""Deadlines of a service that one plan's look-ups may take there."""

# Not an argument of `open`: every store would have to hand it on, and only what waits needs it.
_held: ContextVar[Patience | None] = ContextVar("ragcachekit_patience", default=None)


class Patience:
    """Seconds that each service has taken from one plan.

    Parameters
    ----------
    clock : callable
        Seconds that only grow.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._spent: dict[object, float] = {}

    @contextmanager
    def held(self) -> Iterator[None]:
        """What this thread looks up inside counts."""
        token = _held.set(self)
        try:
            yield
        finally:
            _held.reset(token)

    def lasts(self, service: object, deadline: float) -> bool:
        """Whether another look-up with this deadline ends in time, whatever it does."""
        return self._spent.get(service, 0.0) <= (PLAN_DEADLINES - 1) * deadline

    @contextmanager
    def spending(self, service: object) -> Iterator[None]:
        """Count what a look-up takes."""
        begun = self._clock()
        try:
            yield
        finally:
            self._spent[service] = self._spent.get(service, 0.0) + self._clock() - begun


def patience() -> Patience | None:
    """That of the plan which this thread is making; None outside of plans."""
    return _held.get()
