"""A condition variable that a KeyboardInterrupt cannot leave locked."""

from __future__ import annotations

import time
from _thread import RLock
from collections import deque
from collections.abc import Callable
from itertools import repeat
from threading import TIMEOUT_MAX, Lock
from typing import Any


class Condition(RLock):  # type: ignore[misc] # its stub calls it final, which it is not
    """As :class:`threading.Condition`, for code that Ctrl-C may interrupt between any two steps.

    That one is entered and left in Python, and lets go of its lock in the middle of ``wait``: interrupted
    there, it stays locked for ever, or is released twice ("cannot release un-acquired lock"). This one is
    entered and left by the interpreter in one step, and waiting begins and ends without the lock.
    """

    def __init__(self) -> None:
        super().__init__()
        self._waiters: deque[Any] = deque()

    def wait_for(self, predicate: Callable[[], object], timeout: float | None = None) -> bool:
        """Wait until ``predicate`` is true; False if ``timeout`` seconds did not suffice.

        Called while the lock is not held; the predicate is asked with it. By the time this returns others
        may have changed what it saw.
        """
        end = time.monotonic() + min(TIMEOUT_MAX, timeout if timeout is not None else TIMEOUT_MAX)
        while True:
            woken = Lock()
            with self:
                if predicate():
                    return True
                woken.acquire()
                self._waiters.append(woken)
            left = end - time.monotonic()
            if left <= 0 or not woken.acquire(timeout=min(left, TIMEOUT_MAX)):
                with self:
                    return bool(predicate())

    def notify_all(self) -> None:
        """Have all who wait look again; the lock is held."""
        if self._waiters:  # taken and woken in one call: an interrupt comes between calls
            taken = map(deque.popleft, repeat(self._waiters, len(self._waiters)))
            deque(map(_RELEASE, taken), maxlen=0)


_RELEASE = type(Lock()).release
