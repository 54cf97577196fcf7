"""A limit on how long the look-ups of one plan wait for each remote service."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

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


def lookup_budget() -> LookupBudget | None:
    """The budget of this thread's plan, or None."""
    return _current.get()
