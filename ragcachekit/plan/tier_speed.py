"""How fast a storage tier is, from the reads that it served."""

from __future__ import annotations

import math

FADING = 0.99
"""What a read still counts after the next one: some hundred reads are remembered."""

FIRST = 8
"""Reads that are looked at together, quickest first, before they are believed."""

MOST_TIMES = 8.0
"""How many times as long as expected a read counts at most: one that hung says little about the next."""


class TierSpeed:
    """Seconds of a read as ``latency + (nbytes + beside) / bandwidth``, fitted to some hundred last reads.

    ``beside`` are the bytes that other reads were about when it began: reads that run at once share the
    bandwidth and wait for their latencies side by side. Least squares with fading weights; where all
    reads look the same, all is put down to bandwidth, which is as good for more reads of that kind. A read
    much slower than expected is taken for :data:`MOST_TIMES` as slow: if the tier has become so slow, that
    is known some reads later.
    """

    def __init__(self) -> None:
        self.reads = 0
        self._first: list[tuple[float, float]] = []
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def observe(self, nbytes: float, seconds: float, beside: float = 0) -> None:
        """One more read."""
        self.reads += 1
        self._add(nbytes + beside, seconds)
        if self.reads <= FIRST:
            self._first.append((seconds, nbytes + beside))
        if self.reads == FIRST:  # one of them may have hung before anything else was known
            self.fade(0)
            for seconds, x in sorted(self._first):
                self._add(x, seconds)

    def _add(self, x: float, seconds: float) -> None:
        expected = self._expected(x)
        if expected > 0:
            seconds = min(seconds, MOST_TIMES * expected)
        self._n = FADING * self._n + 1
        self._x = FADING * self._x + x
        self._y = FADING * self._y + seconds
        self._xx = FADING * self._xx + x * x
        self._xy = FADING * self._xy + x * seconds

    def fade(self, reads: float) -> None:
        """Have all so far count as much as the last ``reads`` at most, as it may not hold any more."""
        if self._n > reads:
            less = reads / self._n
            self._n, self._x, self._y = reads, self._x * less, self._y * less
            self._xx, self._xy = self._xx * less, self._xy * less

    @property
    def latency(self) -> float:
        """Seconds before a read's first byte."""
        return self.line()[0]

    @property
    def bandwidth(self) -> float:
        """Bytes per second of all reads together."""
        slope = self.line()[1]
        return 1 / slope if slope > 0 else math.inf

    def line(self) -> tuple[float, float]:
        """Seconds before a read's first byte, and seconds per byte; zeros before the first read."""
        if not self._n or not self._x:
            return 0.0, 0.0
        x, y = self._x / self._n, self._y / self._n
        spread = self._xx / self._n - x * x
        if spread <= (0.1 * x) ** 2:
            return 0.0, y / x
        slope = (self._xy / self._n - x * y) / spread
        if slope <= 0:
            return y, 0.0
        latency = y - slope * x
        return (latency, slope) if latency >= 0 else (0.0, y / x)

    def _expected(self, x: float) -> float:
        """Seconds of a read, not less than the mean: what is fitted may be far off for the smallest."""
        latency, slope = self.line()
        return max(latency + slope * x, self._y / self._n) if self._n else 0.0
