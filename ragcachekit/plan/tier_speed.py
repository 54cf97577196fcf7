"""Speed of a storage tier, measured from its reads."""

from __future__ import annotations

FADING = 0.99
"""Weight of a read relative to the next one: about a hundred reads count."""

FIRST = 8
"""Number of first reads that are fitted again together, quickest first: one of them may have hung."""

MOST_TIMES = 8.0
"""Longest time that counts, relative to the expected one: a read that hung predicts little."""


class TierSpeed:
    """Seconds of a read as ``latency + (nbytes + beside) * slope``: least squares with fading weights.

    ``beside`` are bytes of other reads in flight: reads share the bandwidth and wait for their latencies at
    the same time. Reads of one size are attributed to bandwidth alone.
    """

    def __init__(self) -> None:
        self.reads = 0
        self._first: list[tuple[float, float]] = []
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def observe(self, nbytes: float, seconds: float, beside: float = 0) -> None:
        """Record a read."""
        self.reads += 1
        self._add(nbytes + beside, seconds)
        if self.reads <= FIRST:
            self._first.append((seconds, nbytes + beside))
        if self.reads == FIRST:
            self.fade(0)
            for seconds, x in sorted(self._first):
                self._add(x, seconds)

    def fade(self, reads: float) -> None:
        """Reduce the weight of all reads so far to that of ``reads`` at most."""
        if self._n > reads:
            less = reads / self._n
            self._n, self._x, self._y = reads, self._x * less, self._y * less
            self._xx, self._xy = self._xx * less, self._xy * less

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

    def _add(self, x: float, seconds: float) -> None:
        latency, slope = self.line()
        # The mean is the least that is expected: the line may be far off for the smallest reads.
        expected = max(latency + slope * x, self._y / self._n) if self._n else 0.0
        if expected > 0:
            seconds = min(seconds, MOST_TIMES * expected)
        self._n = FADING * self._n + 1
        self._x = FADING * self._x + x
        self._y = FADING * self._y + seconds
        self._xx = FADING * self._xx + x * x
        self._xy = FADING * self._xy + x * seconds
