"""Load a chunk's KV or compute its rows: whichever ends the prefill sooner."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ragcachekit.model.prefill_profile import PrefillProfile
from ragcachekit.store.loading import LoadingKV

LEAST_READS = 8
"""Reads of a tier before its speed is believed; until then it is loaded from, which measures it."""

FADING = 0.99
"""What a read still counts after the next one: some hundred reads are remembered."""

MOST_SUBSETS = 8

TIE = 0.01
"""Ways whose times differ by less are equal; then the one that computes more is taken, as it is exact."""


@dataclass(frozen=True)
class Candidate:
    """An entry in a slow tier.

    Attributes
    ----------
    tier : str
    reads : int
        Layers that are still to be read.
    nbytes : float
        Bytes of one of them.
    layers : int
    rows : int
        Rows that are not computed if it is used.
    """

    tier: str
    reads: int
    nbytes: float
    layers: int
    rows: int

    @classmethod
    def of(cls, kv: LoadingKV, rows: int) -> Candidate:
        """Of an entry that was opened, or that is being prefetched."""
        return cls(kv.tier, kv.layers - kv.ready, kv.nbytes / kv.layers, kv.layers, rows)


class TierSpeed:
    """Seconds of a read as ``latency + (nbytes + beside) / bandwidth``, fitted to some hundred last reads.

    ``beside`` are the bytes that other reads were about when it began: reads that run at once share the
    bandwidth and wait for their latencies side by side. Least squares with fading weights; where all
    reads look the same, all is put down to bandwidth, which is as good for more reads of that kind.
    """

    def __init__(self) -> None:
        self.reads = 0
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def observe(self, nbytes: float, seconds: float, beside: float = 0) -> None:
        """One more read."""
        x = nbytes + beside
        self.reads += 1
        self._n = FADING * self._n + 1
        self._x = FADING * self._x + x
        self._y = FADING * self._y + seconds
        self._xx = FADING * self._xx + x * x
        self._xy = FADING * self._xy + x * seconds

    @property
    def latency(self) -> float:
        """Seconds before a read's first byte."""
        return self._line()[0]

    @property
    def bandwidth(self) -> float:
        """Bytes per second of all reads together."""
        slope = self._line()[1]
        return 1 / slope if slope > 0 else math.inf

    def _line(self) -> tuple[float, float]:
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


@dataclass(frozen=True)
class _Way:
    """A subset of candidates: which to load, and how long that and the computing take."""

    loaded: frozenset[int]
    load: float
    compute: float
    end: float


class LoadPlanner:
    """Knows how fast tiers and model are, from all that was loaded and prefilled. Thread safe.

    Parameters
    ----------
    profile : PrefillProfile, optional
        Without one everything is loaded.
    readers : int
        Entries that are read at the same time.
    """

    def __init__(self, profile: PrefillProfile | None = None, readers: int = 1) -> None:
        self.profile = profile
        self._readers = readers
        self._speeds: dict[str, TierSpeed] = {}
        self._lock = threading.Lock()

    def observe_read(self, tier: str, nbytes: int, seconds: float, beside: int = 0) -> None:
        """A layer was read while other reads were about ``beside`` bytes."""
        with self._lock:
            self._speeds.setdefault(tier, TierSpeed()).observe(nbytes, seconds, beside)

    def observe_prefill(self, cached: int, new: int, seconds: float) -> None:
        """A prefill of ``new`` rows over ``cached`` ones took this long, without waiting for loads."""
        if self.profile is not None and new > 0 and seconds > 0:
            with self._lock:
                self.profile.observed(cached, new, seconds)

    def load_seconds(self, candidates: Sequence[Candidate]) -> float | None:
        """What is left to read of all of them together; None if a tier is not known yet."""
        left = [candidate for candidate in candidates if candidate.reads]
        at_once = min(self._readers, len(left))
        seconds = 0.0
        with self._lock:
            for candidate in left:
                speed = self._speeds.get(candidate.tier)
                if speed is None or speed.reads < LEAST_READS:
                    return None
                latency, slope = speed._line()
                seconds += candidate.reads * (latency / at_once + slope * candidate.nbytes)
        return seconds

    def choose(self, candidates: Sequence[Candidate], total: int, computed: int) -> tuple[list[bool], int]:
        """Which candidates to load, and the preloading depth of what is loaded.

        Up to :data:`MOST_SUBSETS` every subset is looked at. Beyond, they are sorted by load time per row
        spared, every beginning of that order is tried, and the best one is improved by single changes
        and exchanges: how well loading and computing balance depends on which lengths come together.

        Parameters
        ----------
        candidates : sequence of Candidate
        total : int
            Rows of the prompt.
        computed : int
            Rows that are computed in any case.
        """
        if self.profile is None or not candidates or self.load_seconds(candidates) is None:
            return [True] * len(candidates), 1
        everyone = range(len(candidates))

        def way(loaded: frozenset[int]) -> _Way:
            return self._way(candidates, loaded, total, computed)

        if len(candidates) <= MOST_SUBSETS:
            subsets = (c for n in range(len(candidates) + 1) for c in itertools.combinations(everyone, n))
            ways = [way(frozenset(subset)) for subset in subsets]
        else:
            alone = [way(frozenset([i])).load / max(candidates[i].rows, 1) for i in everyone]
            order = sorted(everyone, key=alone.__getitem__)
            ways = [way(frozenset(order[:count])) for count in range(len(order) + 1)]
            ways.append(_improved(min(ways, key=lambda w: w.end), len(candidates), way))
        least = min(w.end for w in ways)
        best = max((w for w in ways if w.end <= least * (1 + TIE)), key=lambda w: (w.compute, -w.end))
        depth = preload_depth(candidates[0].layers, best.compute, best.load)
        return [i in best.loaded for i in everyone], depth

    def _way(
        self, candidates: Sequence[Candidate], loaded: frozenset[int], total: int, computed: int
    ) -> _Way:
        assert self.profile is not None
        load = self.load_seconds([candidates[i] for i in loaded]) or 0.0
        rows = computed + sum(c.rows for i, c in enumerate(candidates) if i not in loaded)
        compute = self.profile.seconds(total - rows, rows)
        return _Way(loaded, load, compute, pipelined(load, compute, candidates[0].layers))


def _improved(best: _Way, count: int, way: Callable[[frozenset[int]], _Way]) -> _Way:
    """The way after the first single changes and exchanges that make it quicker, until none does."""
    while True:
        inside, outside = best.loaded, frozenset(range(count)) - best.loaded
        changes = itertools.chain(
            (inside ^ {i} for i in range(count)),
            (inside - {i} | {j} for i in inside for j in outside),
        )
        better = next((w for w in map(way, changes) if w.end < best.end * (1 - TIE / 2)), None)
        if better is None:
            return best
        best = better


def pipelined(load: float, compute: float, layers: int) -> float:
    """Seconds of a prefill that computes layer by layer while later layers load.

    The slower of the two runs through, and the other has one layer more before or behind it.
    """
    return max(compute + load / layers, load + compute / layers)


def preload_depth(layers: int, prefill: float, load: float) -> int:
    """Layers to have before layer 0 computes, so that none is waited for later (Cache-Craft eq. 16).

    ``ceil((layers - 1) (1 - prefill / load)) + 1``, at least 1.
    """
    if load <= prefill:
        return 1
    return max(1, math.ceil((layers - 1) * (1 - prefill / load)) + 1)
