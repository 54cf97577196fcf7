"""Prefix-aware greedy dual size frequency (RAGCache section 5.1, Algorithm 1)."""

from __future__ import annotations

from ragcachekit.store.eviction.base import Access, Record
from ragcachekit.store.eviction.gdsf import Gdsf
from ragcachekit.store.eviction.window import Seconds

WINDOW = 10_000


class Pgdsf(Gdsf):
    """Priority = clock + frequency x average cost.

    The average cost is the mean, over the accesses that missed, of the request's prefill time by its new
    tokens. It is divided by the first known cost, which changes no order. An entry of unknown cost counts as
    the average of the known ones; where no cost is known, this is GDSF.

    Parameters
    ----------
    window : int, Seconds or None
        Accesses of the tier, or a time as in the paper, within which accesses count as frequency, also those
        from before an entry was evicted. None counts as GDSF does.
    """

    def __init__(self, window: int | Seconds | None = WINDOW) -> None:
        super().__init__(window)
        self._unit = 0.0
        self._total = 0.0
        self._known = 0

    def accessed(self, record: Record, access: Access, now: int) -> None:
        frequency = self._window.count(record, access, now)
        if not access.hit and access.seconds > 0 and access.new_tokens > 0:
            cost = access.seconds / access.new_tokens
            record.missed += 1
            record.cost += cost
            self._unit = self._unit or cost
            self._total += cost
            self._known += 1
        record.priority = self.clock + frequency * self._cost(record)

    def _cost(self, record: Record) -> float:
        if not self._known:
            return 1.0
        average = record.cost / record.missed if record.missed else self._total / self._known
        return average / self._unit
