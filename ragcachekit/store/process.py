"""What has threads and locks, and must not be shared with a forked process."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class PerProcess(Generic[T]):
    """One object in each process: after a fork, the child makes one of its own when it first asks.

    Of the parent's object the child has a copy whose threads are gone and whose locks may be taken for
    ever by one of them.

    Parameters
    ----------
    make : callable
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._made = {os.getpid(): make()}

    def get(self) -> T:
        """This process's own."""
        pid = os.getpid()
        own = self._made.get(pid)
        if own is None:
            own = self._made.setdefault(pid, self._make())
            for other in self._made.keys() - {pid}:
                self._made.pop(other, None)
        return own
