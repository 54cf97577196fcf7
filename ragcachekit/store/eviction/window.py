"""Frequencies within a window of accesses or of time, in two numbers per entry."""

from __future__ import annotations

import time

from ragcachekit.store.eviction.base import Access, Record


class Seconds(float):
    """A window's length in seconds of the monotonic clock."""


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
        if length is not None and length < 1:
            raise ValueError(f"a window must be at least 1 access or 1 second long, got {length}")
        self._length = length

    def count(self, record: Record, access: Access, now: int) -> float:
        """Count access number ``now`` of the tier; sets and returns ``record.frequency``."""
        if self._length is None:
            record.frequency = record.frequency + access.times if access.hit else float(access.times)
            return record.frequency
        at = time.monotonic() if isinstance(self._length, Seconds) else now
        bucket, into = divmod(at, self._length)
        passed = bucket - record.bucket
        if passed:
            record.previous = record.current if passed == 1 else 0.0
            record.current, record.bucket = 0.0, bucket
        record.current += access.times
        record.frequency = record.current + record.previous * (1 - into / self._length)
        return record.frequency
