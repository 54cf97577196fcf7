"""How many requests run, for work that waits until none does."""

from __future__ import annotations

from threading import Event, Lock

from ragcachekit.cancellation import raise_if_cancelled
from ragcachekit.errors import Cancelled

_EVERY = 0.02  # seconds between two looks


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
