"""Choice between loading a chunk's KV and computing its rows: whichever ends the prefill sooner."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ragcachekit.model.prefill_profile import PrefillProfile
from ragcachekit.plan.row_cost import RowCost, ScoringPass
from ragcachekit.plan.tier_speed import TierSpeed
from ragcachekit.store.load import LoadingKV

LEAST_READS = 8
"""Reads before a tier's speed is trusted; until then everything is loaded, which measures it."""

MOST_SUBSETS = 8

LEAST_SKIPPED = 16
"""Plans in a row without a read of a tier before one tries it again."""

TRYING = 0.02
"""Cost limit of such trials, as a share of the prefill time of the plans between them."""

TIE = 0.01
"""Relative difference below which times are equal; then the choice that computes more, as it is exact."""


@dataclass(frozen=True)
class Candidate:
    """An entry in a slow tier.

    ``reads`` layers remain to be read, ``nbytes`` each. Using it spares ``rows`` and recomputes
    ``recomputed``. ``is_exact``: no policy selects among its rows.
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
        """From an opened entry and all its uses in a prompt."""
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
class _Schedule:
    """A set of candidates to load, and its times in seconds."""

    loaded: frozenset[int]
    load: float
    compute: float
    end: float


@dataclass
class _Skipped:
    """Plans since the last read of a tier, and their prefill time together."""

    plans: int = 0
    seconds: float = 0.0


class LoadPlanner:
    """Planner with measured speeds of tiers and model. Thread safe.

    A slow tier may have become fast, which only reads can show: now and then an entry of a tier without
    recent reads is loaded all the same, at a cost limited by :data:`TRYING`. Without a ``profile`` everything
    is loaded. ``readers`` entries are read at the same time.
    """

    def __init__(self, profile: PrefillProfile | None = None, readers: int = 1) -> None:
        self.profile = profile
        self._readers = readers
        self._speeds: dict[str, TierSpeed] = {}
        self._skipped: dict[str, _Skipped] = {}
        self._lock = threading.Lock()

    def observe_read(self, tier: str, nbytes: int, seconds: float, beside: int = 0) -> None:
        """Record the read of a layer while ``beside`` bytes of other reads were in flight."""
        with self._lock:
            self._speeds.setdefault(tier, TierSpeed()).observe(nbytes, seconds, beside)
            self._skipped.pop(tier, None)

    def observe_prefill(self, cached: int, new: int, seconds: float) -> None:
        """Record a prefill of ``new`` rows over ``cached`` ones that did not wait for loads."""
        if self.profile is not None and new > 0 and seconds > 0:
            with self._lock:
                self.profile.observed(cached, new, seconds)

    def load_seconds(self, candidates: Sequence[Candidate]) -> float | None:
        """Time of all remaining reads together; None if a tier's speed is unknown."""
        remaining = [candidate for candidate in candidates if candidate.reads]
        at_once = min(self._readers, len(remaining))
        seconds = 0.0
        with self._lock:
            for candidate in remaining:
                speed = self._speeds.get(candidate.tier)
                if speed is None or speed.reads < LEAST_READS:
                    return None
                latency, slope = speed.line()
                seconds += candidate.reads * (latency / at_once + slope * candidate.nbytes)
        return seconds

    def hides(self, candidates: Sequence[Candidate], cached: int, computed: int) -> bool:
        """Whether a prefill of ``computed`` rows that begins now does not wait for the remaining reads.

        Then at least L_p layers are read (Cache-Craft section 3.4). True where times are not known.
        """
        load = self.load_seconds(candidates)
        if self.profile is None or not load:
            return True
        layers = candidates[0].layers
        if any(candidate.reads == layers for candidate in candidates):
            return False  # the first layer is needed at once
        return load <= self.profile.seconds(cached, computed) * (layers - 1) / layers

    def choose(
        self, candidates: Sequence[Candidate], total: int, computed: int, guide: ScoringPass | None = None
    ) -> list[bool]:
        """Which candidates to load.

        All subsets of up to :data:`MOST_SUBSETS` are compared. More are sorted by load time per spared row,
        every prefix of that order is tried, and the best is improved by single changes and exchanges.
        ``total`` are the prompt's rows, ``computed`` those computed in any case; ``guide`` is the policy's
        pass before the forward, if any.
        """
        if self.profile is None or not candidates or self.load_seconds(candidates) is None:
            return [True] * len(candidates)
        everyone = range(len(candidates))

        def schedule(loaded: frozenset[int]) -> _Schedule:
            return self._schedule(candidates, loaded, total, computed, guide)

        if len(candidates) <= MOST_SUBSETS:
            subsets = (c for n in range(len(candidates) + 1) for c in itertools.combinations(everyone, n))
            schedules = [schedule(frozenset(subset)) for subset in subsets]
        else:
            alone = [schedule(frozenset([i])).load / max(candidates[i].rows, 1) for i in everyone]
            order = sorted(everyone, key=alone.__getitem__)
            schedules = [schedule(frozenset(order[:count])) for count in range(len(order) + 1)]
            schedules.append(_improved(min(schedules, key=lambda s: s.end), len(candidates), schedule))
        least = min(s.end for s in schedules)
        best = max((s for s in schedules if s.end <= least * (1 + TIE)), key=lambda s: (s.compute, -s.end))
        best = self._with_trials(candidates, best, schedule)
        return [i in best.loaded for i in everyone]

    def _with_trials(
        self,
        candidates: Sequence[Candidate],
        best: _Schedule,
        schedule: Callable[[frozenset[int]], _Schedule],
    ) -> _Schedule:
        """``best``, with one more entry of each tier that is due for a trial."""
        for tier in {c.tier for c in candidates} - {candidates[i].tier for i in best.loaded}:
            entries = [i for i, c in enumerate(candidates) if c.tier == tier and c.reads]
            if not entries:
                continue
            smallest = min(entries, key=lambda i: candidates[i].reads * candidates[i].nbytes)
            trial = schedule(best.loaded | {smallest})
            with self._lock:
                skipped = self._skipped.setdefault(tier, _Skipped())
                skipped.plans += 1
                skipped.seconds += best.end
                if skipped.plans < LEAST_SKIPPED or trial.end - best.end > TRYING * skipped.seconds:
                    continue
                self._skipped.pop(tier)
                self._speeds[tier].fade(LEAST_READS)
            best = trial
        return best

    def _schedule(
        self,
        candidates: Sequence[Candidate],
        loaded: frozenset[int],
        total: int,
        computed: int,
        guide: ScoringPass | None,
    ) -> _Schedule:
        assert self.profile is not None
        used = [c for i, c in enumerate(candidates) if i in loaded]
        others = [c for i, c in enumerate(candidates) if i not in loaded]
        load, layers = self.load_seconds(used) or 0.0, candidates[0].layers
        rows = computed + sum(c.recomputed for c in candidates) + sum(c.rows for c in others)
        compute = self.profile.seconds(total - rows, rows)
        if guide is None or not (guide.always or any(not c.is_exact for c in used)):
            return _Schedule(loaded, load, compute, pipelined(load, compute, layers))
        rows, seen = guide.rows + sum(c.rows + c.recomputed for c in others), guide.layers(layers)
        watch = self.profile.seconds(total - rows, rows) * seen / layers
        return _Schedule(loaded, load, compute, pipelined_twice(load, watch, compute, layers, seen))


def _improved(best: _Schedule, count: int, schedule: Callable[[frozenset[int]], _Schedule]) -> _Schedule:
    """``best`` after single changes and exchanges, as long as one of them is quicker."""
    while True:
        inside, outside = best.loaded, frozenset(range(count)) - best.loaded
        changes = itertools.chain(
            (inside ^ {i} for i in range(count)),
            (inside - {i} | {j} for i in inside for j in outside),
        )
        better = next((s for s in map(schedule, changes) if s.end < best.end * (1 - TIE / 2)), None)
        if better is None:
            return best
        best = better


def pipelined(load: float, compute: float, layers: int) -> float:
    """Seconds of a prefill that computes layer by layer while later layers load."""
    return max(compute + load / layers, load + compute / layers)


def pipelined_twice(load: float, watch: float, compute: float, layers: int, seen: int) -> float:
    """As :func:`pipelined`, after a pass of ``watch`` seconds over the first ``seen`` layers."""
    watched = max(watch + load / layers, load * seen / layers + watch / seen)
    return max(watched + compute, load + compute / layers)
