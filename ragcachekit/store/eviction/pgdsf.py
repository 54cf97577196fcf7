"""Prefix-aware greedy dual size frequency (RAGCache section 5.1, Algorithm 1)."""

from __future__ import annotations

from ragcachekit.store.eviction.base import Access, Record
from ragcachekit.store.eviction.window import Seconds, Window

WINDOW = 10_000


class Pgdsf:
    """Priority = clock + frequency x average cost; the clock is the highest priority that was evicted.

    The average cost is the mean, over the accesses that missed, of the time that the whole request's
    prefill took by its new tokens. It is counted in multiples of the first cost that this tier heard
    of, which changes no order; so an entry whose cost nobody knows (encoded ahead, say) has a place
    among the others: it counts as the average of what is known, and where nothing is, this is GDSF.

    Parameters
    ----------
    window : int, Seconds or None
        Accesses of the tier, or the time (as in the paper), within which accesses count as frequency, also
        those from before an entry was evicted: the paper counts retrievals of a document, cached or not.
        None counts as GDSF does.
    """

    name = "pgdsf"

    def __init__(self, window: int | Seconds | None = WINDOW) -> None:
        self._window = Window(window)
        self.clock = 0.0
        self._unit = 0.0
        self._total = 0.0
        self._known = 0

    def accessed(self, record: Record, access: Access, now: int) -> None:
        """Count the access, and if it missed what that cost; rank by both above the clock."""
        frequency = self._window.count(record, access, now)
        if not access.hit and access.seconds > 0 and access.new_tokens > 0:
            self._learn(record, access.seconds / access.new_tokens)
        record.priority = self.clock + frequency * self._cost(record)

    def evicted(self, record: Record) -> None:
        """Bring the clock up to what has left."""
        self.clock = max(self.clock, record.priority)

    def _learn(self, record: Record, cost: float) -> None:
        record.missed += 1
        record.cost += cost
        self._unit = self._unit or cost
        self._total += cost
        self._known += 1

    def _cost(self, record: Record) -> float:
        if not self._known:
            return 1.0
        average = record.cost / record.missed if record.missed else self._total / self._known
        return average / self._unit
