"""How many requests run, for work that waits until none does, or gives way."""

from __future__ import annotations

import time
from threading import Event, Lock
from typing import Protocol

from ragcachekit.cancellation import raise_if_cancelled
from ragcachekit.errors import Cancelled

_EVERY = 0.02  # seconds between two looks

SHARE = 0.1
"""Part of the time that background work gets while requests run: not none, under a load that never ends."""

_LONGEST = 1.0  # seconds of work without a pause that are counted


class ActiveRequests:
    """A ``with`` block around every request counts it. Thread safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self.running = 0

    def __enter__(self) -> None:
        with self._lock:
            self.running += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self.running -= 1

    def wait_for_none(self, closed: Event) -> None:
        """Wait until no request runs; Cancelled once ``closed`` is set, or in a cancelled scope."""
        raise_if_cancelled()
        while self.running:
            if closed.wait(_EVERY):
                raise Cancelled("closed while waiting for requests")


class Running(Protocol):
    """Counts requests."""

    @property
    def running(self) -> int:
        """How many run now."""


class GiveWay:
    """Slows the model work of one thread down while requests run, to ``share`` of the time.

    It competes for the processor with the first token that somebody waits for. Called before every layer.
    """

    def __init__(self, active: Running, share: float = SHARE) -> None:
        self._active, self._share, self._since = active, share, time.monotonic()

    def __call__(self, closed: Event) -> None:
        """Wait until no request runs, a multiple of the time since the last call at most, or ``closed``."""
        now = time.monotonic()
        end = now + min(now - self._since, _LONGEST) * (1 / self._share - 1)
        while self._active.running and (left := end - time.monotonic()) > 0:
            if closed.wait(min(_EVERY, left)):
                break
        self._since = time.monotonic()
