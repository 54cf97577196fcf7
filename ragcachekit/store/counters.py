"""Event counts of a tier."""

from __future__ import annotations

import logging
from threading import Lock

from ragcachekit.store.base import StoreStats

_log = logging.getLogger(__name__)


class Counters:
    """Thread-safe event counts of one tier, and a log of its failures."""

    def __init__(self, tier: str) -> None:
        self._tier = tier
        self._lock = Lock()
        self._warned: set[str] = set()
        self._counts = {"hits": 0, "misses": 0, "evictions": 0, "damaged": 0, "failed_writes": 0}

    def count(self, event: str, by: int = 1) -> None:
        """Add to ``hits``, ``misses``, ``evictions``, ``damaged`` or ``failed_writes``."""
        with self._lock:
            self._counts[event] += by

    def warn_once(self, kind: str, message: str, *args: object) -> None:
        """Log a warning the first time, at debug level afterwards."""
        with self._lock:
            level = logging.DEBUG if kind in self._warned else logging.WARNING
            self._warned.add(kind)
        _log.log(level, f"%s tier: {message}", self._tier, *args)

    def stats(self, *, entries: int, nbytes: int, budget: int, writable: bool = True) -> StoreStats:
        """The counts together with the tier's present content."""
        with self._lock:
            return StoreStats(self._tier, entries, nbytes, budget, **self._counts, writable=writable)
