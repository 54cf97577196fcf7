"""Frequencies within a window of accesses or of time, in two numbers per entry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ragcachekit.store.eviction.base import Access, Record


@dataclass(frozen=True)
class Seconds:
    """A window's length in seconds, and the clock."""

    length: float
    clock: Callable[[], float]


class Window:
    """Counts an entry's accesses within the last ``length``, by two buckets.

    Accesses of the tier, or time, are divided into buckets of that length. The bucket before counts by the
    share of it that the window still covers. This is exact for even use and needs no list of times. A
    frequency is that of the entry's last access, as in RAGCache's Algorithm 1.

    Parameters
    ----------
    length : int, Seconds or None
        Accesses of the tier, or a time, also from before the entry was evicted; None counts accesses since
        the entry last came in.
    """

    def __init__(self, length: int | Seconds | None = None) -> None:
        if isinstance(length, Seconds):
            if length.length <= 0:
                raise ValueError(f"a window must be longer than 0 seconds, got {length.length}")
        elif length is not None and length < 1:
            raise ValueError(f"a window must be at least 1 access long, got {length}")
        self.length = length

    def count(self, record: Record, access: Access, now: int) -> float:
        """Count access number ``now`` of the tier; sets and returns ``record.frequency``."""
        if self.length is None:
            record.frequency = record.frequency + access.times if access.hit else float(access.times)
            return record.frequency
        bucket, share = self._place(now)
        passed = bucket - record.bucket
        if passed:
            record.previous = record.current if passed == 1 else 0.0
            record.current, record.bucket = 0.0, bucket
        record.current += access.times
        record.frequency = record.current + record.previous * (1 - share)
        return record.frequency

    def _place(self, now: int) -> tuple[int, float]:
        """Number of the bucket, and the share of it that has passed."""
        assert self.length is not None
        if isinstance(self.length, Seconds):
            bucket, into = divmod(self.length.clock(), self.length.length)
            return int(bucket), into / self.length.length
        bucket, into = divmod(now, self.length)
        return bucket, into / self.length
