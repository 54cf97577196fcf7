"""Frequencies within a window of accesses, in two numbers per entry."""

from __future__ import annotations

from ragcachekit.store.eviction.base import Access, Record


class Window:
    """Counts an entry's accesses among the last ``accesses`` of the tier, by two buckets.

    The accesses of the tier are cut into buckets of that length; what an entry had in the bucket before
    counts by the share of it that the window still covers. This is exact for an entry that is used
    evenly, never counts what is older than two buckets, and unlike a true sliding window needs no list
    of times.

    Parameters
    ----------
    accesses : int or None
        Length of the window; None counts since the entry last came in.
    """

    def __init__(self, accesses: int | None = None) -> None:
        if accesses is not None and accesses < 1:
            raise ValueError(f"a window must be at least 1 access long, got {accesses}")
        self.accesses = accesses

    def count(self, record: Record, access: Access, now: int) -> float:
        """Count the access, number ``now`` of the tier, and set ``record.frequency``, which is returned."""
        if self.accesses is None:
            record.frequency = record.frequency + access.times if access.hit else float(access.times)
            return record.frequency
        bucket, into = divmod(now, self.accesses)
        passed = bucket - record.at // self.accesses
        if passed:
            record.previous = record.current if passed == 1 else 0.0
            record.current = 0.0
        record.current += access.times
        record.frequency = record.current + record.previous * (1 - into / self.accesses)
        return record.frequency
