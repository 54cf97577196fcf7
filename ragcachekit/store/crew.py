"""The threads of a loader: as many as there is work for, and others in place of those that hang."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ragcachekit.store.loading import Load

log = logging.getLogger(__name__)

MOST_STUCK = 4
"""Threads that hang in a read (a mount that is gone) and have another one in their place."""


@dataclass(eq=False)
class Crew:
    """Who reads, and what. Guarded by the desk's condition.

    Attributes
    ----------
    threads : int
        How many read at the same time.
    alive : set of threading.Thread
    doing : dict
        What each thread works at, and since when by :func:`time.monotonic`; None while it opens an entry.
    stuck : set of threading.Thread
        Those that a request has given up waiting for; they do not count any more until they come back.
    """

    threads: int
    alive: set[threading.Thread] = field(default_factory=set)
    doing: dict[threading.Thread, tuple[Load | None, float]] = field(default_factory=dict)
    stuck: set[threading.Thread] = field(default_factory=set)

    @property
    def useful(self) -> int:
        """Threads that do not hang."""
        return len(self.alive) - len(self.stuck)

    @property
    def hopeless(self) -> bool:
        """Whether as many threads hang as may: nothing can be read."""
        return len(self.stuck) >= self.threads + MOST_STUCK

    def hire(self, work: int, target: Callable[[], None]) -> None:
        """Have a thread for each of so many things to do, up to :attr:`threads`, as far as any can be had."""
        while self.useful < min(self.threads, work) and len(self.alive) < self.threads + MOST_STUCK:
            thread = threading.Thread(target=target, name="ragcachekit-load", daemon=True)
            try:
                self.alive.add(thread)
                thread.start()
            except RuntimeError as error:
                self.alive.discard(thread)
                log.warning("no thread to load with: %s", error)
                break
            except BaseException:  # interrupted: if it runs all the same, it comes back
                self.alive.discard(thread)
                raise

    def late(self, late: Load, seconds: float) -> list[Load]:
        """Count those as stuck who read ``late`` or anything for ``seconds``; what these read."""
        old = time.monotonic() - seconds
        held_up = []
        for thread, (load, since) in self.doing.items():
            if load is late or since <= old:
                self.stuck.add(thread)
                if load is not None:
                    held_up.append(load)
        return held_up

    def begins(self, thread: threading.Thread, load: Load | None) -> None:
        """It reads this now, or opens an entry."""
        self.doing[thread] = load, time.monotonic()

    def back(self, thread: threading.Thread) -> bool:
        """It is done with what it did; False if others work in its place, as it hung: then it has left."""
        self.alive.add(thread)
        self.doing.pop(thread, None)
        self.stuck.discard(thread)
        if self.useful > self.threads:
            self.leave(thread)
            return False
        return True

    def leave(self, thread: threading.Thread) -> None:
        """It ends."""
        self.alive.discard(thread)
