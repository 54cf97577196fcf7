"""Load a chunk's KV or compute its rows: whichever ends the prefill sooner."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ragcachekit.model.prefill_profile import PrefillProfile
from ragcachekit.plan.row_cost import RowCost, ScoringPass
from ragcachekit.plan.tier_speed import TierSpeed
from ragcachekit.store.loading.load import LoadingKV

LEAST_READS = 8
"""Reads of a tier before its speed is believed; until then it is loaded from, which measures it."""

MOST_SUBSETS = 8

LEAST_LEFT = 16
"""Plans in a row that leave a tier alone before one tries it again."""

TRYING = 0.02
"""What such tries may cost, as a part of the time that prompts take meanwhile."""

TIE = 0.01
"""Ways whose times differ by less are equal; then the one that computes more is taken, as it is exact."""


@dataclass(frozen=True)
class Candidate:
    """An entry in a slow tier.

    ``reads`` layers are still to be read, ``nbytes`` each. ``rows`` are not computed if it is used, and
    ``recomputed`` are even so. ``is_exact``: no policy chooses among its rows.
    """

    tier: str
    reads: int
    nbytes: float
    layers: int
    rows: int
    recomputed: int = 0
    is_exact: bool = False

    @classmethod
    def of(cls, kv: LoadingKV, uses: Sequence[RowCost]) -> Candidate:
        """Of an entry that was opened, or that is being prefetched, and all its uses in a prompt."""
        return cls(
            kv.tier,
            kv.layers - kv.ready,
            kv.nbytes / kv.layers,
            kv.layers,
            sum(use.spared for use in uses),
            sum(use.recomputed for use in uses),
            all(use.is_exact for use in uses),
        )


@dataclass(frozen=True)
class _Way:
    """A subset of candidates: which to load, and how long that and the computing take."""

    loaded: frozenset[int]
    load: float
    compute: float
    end: float


@dataclass
class _Left:
    """Plans that left a tier alone since it was last read from, and what they took together."""

    plans: int = 0
    seconds: float = 0.0


class LoadPlanner:
    """Knows how fast tiers and model are, from all that was loaded and prefilled. Thread safe.

    A tier that was slow may be quick again, which only reads can show: now and then one entry of a tier
    that was left alone for long is loaded all the same, see :data:`TRYING`.

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
        self._left: dict[str, _Left] = {}
        self._lock = threading.Lock()

    def observe_read(self, tier: str, nbytes: int, seconds: float, beside: int = 0) -> None:
        """A layer was read while other reads were about ``beside`` bytes."""
        with self._lock:
            self._speeds.setdefault(tier, TierSpeed()).observe(nbytes, seconds, beside)
            self._left.pop(tier, None)

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
                latency, slope = speed.line()
                seconds += candidate.reads * (latency / at_once + slope * candidate.nbytes)
        return seconds

    def choose(
        self, candidates: Sequence[Candidate], total: int, computed: int, guide: ScoringPass | None = None
    ) -> tuple[list[bool], int]:
        """Which candidates to load, and the preloading depth of what is loaded.

        Up to :data:`MOST_SUBSETS` every subset is looked at. Beyond, they are sorted by load time per row
        spared, every beginning of that order is tried, and the best one is improved by single changes
        and exchanges: how well loading and computing balance depends on which lengths come together.

        ``total`` are the prompt's rows, ``computed`` those that are computed in any case, and ``guide`` is
        the pass before the forward, of a policy that watches the question.
        """
        if self.profile is None or not candidates or self.load_seconds(candidates) is None:
            return [True] * len(candidates), 1
        everyone = range(len(candidates))

        def way(loaded: frozenset[int]) -> _Way:
            return self._way(candidates, loaded, total, computed, guide)

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
        best = self._trying(candidates, best, way)
        depth = preload_depth(candidates[0].layers, best.compute, best.load)
        return [i in best.loaded for i in everyone], depth

    def _trying(
        self, candidates: Sequence[Candidate], best: _Way, way: Callable[[frozenset[int]], _Way]
    ) -> _Way:
        """``best``, or the one that loads an entry more, of a tier that is due to be tried again."""
        for tier in {c.tier for c in candidates} - {candidates[i].tier for i in best.loaded}:
            entries = [i for i, c in enumerate(candidates) if c.tier == tier and c.reads]
            if not entries:
                continue
            least = min(entries, key=lambda i: candidates[i].reads * candidates[i].nbytes)
            trial = way(best.loaded | {least})
            with self._lock:
                left = self._left.setdefault(tier, _Left())
                left.plans += 1
                left.seconds += best.end
                if left.plans < LEAST_LEFT or trial.end - best.end > TRYING * left.seconds:
                    continue
                self._left.pop(tier)
                self._speeds[tier].fade(LEAST_READS)
            best = trial
        return best

    def _way(
        self,
        candidates: Sequence[Candidate],
        loaded: frozenset[int],
        total: int,
        computed: int,
        guide: ScoringPass | None,
    ) -> _Way:
        assert self.profile is not None
        used, left = _split(candidates, loaded)
        load, layers = self.load_seconds(used) or 0.0, candidates[0].layers
        rows = computed + sum(c.recomputed for c in candidates) + sum(c.rows for c in left)
        compute = self.profile.seconds(total - rows, rows)
        if guide is None or not (guide.always or any(not c.is_exact for c in used)):
            return _Way(loaded, load, compute, pipelined(load, compute, layers))
        rows, seen = guide.rows + sum(c.rows + c.recomputed for c in left), guide.layers(layers)
        watch = self.profile.seconds(total - rows, rows) * seen / layers
        return _Way(loaded, load, compute, pipelined_twice(load, watch, compute, layers, seen))


def _split(
    candidates: Sequence[Candidate], loaded: frozenset[int]
) -> tuple[list[Candidate], list[Candidate]]:
    """Those that are loaded, and the others."""
    used = [c for i, c in enumerate(candidates) if i in loaded]
    return used, [c for i, c in enumerate(candidates) if i not in loaded]


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


def pipelined_twice(load: float, watch: float, compute: float, layers: int, seen: int) -> float:
    """As :func:`pipelined`, behind a pass of ``watch`` seconds over the first ``seen`` layers.

    That pass is the one that waits for layers; the forward waits for those behind them.
    """
    watched = max(watch + load / layers, load * seen / layers + watch / seen)
    return max(watched + compute, load + compute / layers)


def preload_depth(layers: int, prefill: float, load: float) -> int:
    """Layers to have before layer 0 computes, so that none is waited for later (Cache-Craft eq. 16).

    ``ceil((layers - 1) (1 - prefill / load)) + 1``, at least 1.
    """
    if load <= prefill:
        return 1
    return max(1, math.ceil((layers - 1) * (1 - prefill / load)) + 1)
