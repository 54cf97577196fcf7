"""Choice between loading a chunk's KV and computing its rows: measured reads against measured prefills."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ragcachekit.model.prefill_profile import PrefillProfile
from ragcachekit.policies.base import GuidedPolicy, LayerwisePolicy, PlacedChunk, SelectionPolicy
from ragcachekit.store.load import LoadingKV

MIN_READS = 8
"""Reads before a tier's speed is trusted; until then everything is loaded, which measures it."""

TIE = 0.01
"""Relative difference below which times are equal; then the choice that computes more, as it is exact."""

_FADING = 0.99  # weight of a read relative to the next one: about a hundred reads count
_MAX_SLOWER = 8.0  # longest time that counts, relative to the expected one: a read that hung predicts little


@dataclass(frozen=True)
class RowCost:
    """Rows that using an entry at one place spares and recomputes."""

    spared: int
    recomputed: int = 0


def row_cost_of(policy: SelectionPolicy, chunk: PlacedChunk, layers: int) -> RowCost:
    """Row cost of a chunk under ``policy``; all rows of a layer-wise one count as spared."""
    if chunk.is_exact or isinstance(policy, LayerwisePolicy):
        return RowCost(chunk.tokens)
    if isinstance(policy, GuidedPolicy):
        # The question decides which rows, not how many.
        watched = layers if policy.look.layers is None else len(policy.look.layers)
        chosen = len(policy.choose([chunk], [torch.ones(chunk.stop)] * watched))
    else:
        chosen = len(policy.select([chunk]))
    return RowCost(chunk.tokens - chosen, chosen)


@dataclass(frozen=True)
class Candidate:
    """An entry in a slow tier.

    ``reads`` layers remain to be read, ``nbytes`` each. Using it spares ``rows`` and recomputes
    ``recomputed``.
    """

    tier: str
    reads: int
    nbytes: float
    layers: int
    rows: int
    recomputed: int = 0

    @classmethod
    def of(cls, kv: LoadingKV, uses: Sequence[RowCost]) -> Candidate:
        """From an opened entry and all its uses in a prompt."""
        spared, recomputed = (sum(getattr(use, name) for use in uses) for name in ("spared", "recomputed"))
        return cls(kv.tier, kv.layers - kv.ready, kv.nbytes / kv.layers, kv.layers, spared, recomputed)


class ReadRate:
    """Bytes per second of a tier, over its last reads. Reads at the same time share the bandwidth."""

    def __init__(self) -> None:
        self.reads = 0
        self._nbytes = self._seconds = 0.0

    def observe(self, nbytes: float, seconds: float, beside: float = 0) -> None:
        """Record a read while ``beside`` bytes of other reads were in flight."""
        self.reads += 1
        moved = nbytes + beside
        if self._nbytes:
            seconds = min(seconds, _MAX_SLOWER * self.seconds(moved))
        self._nbytes = _FADING * self._nbytes + moved
        self._seconds = _FADING * self._seconds + seconds

    def seconds(self, nbytes: float) -> float:
        """Expected time of reading so much; 0 before the first read."""
        return nbytes * self._seconds / self._nbytes if self._nbytes else 0.0


class LoadPlanner:
    """Compares the time of loads with that of computing. Thread safe.

    Without a ``profile`` everything is loaded. What is not loaded should be read afterwards, which keeps the
    rate of its tier current.
    """

    def __init__(self, profile: PrefillProfile | None = None) -> None:
        self.profile = profile
        self._rates: dict[str, ReadRate] = {}
        self._lock = threading.Lock()

    def observe_read(self, tier: str, nbytes: int, seconds: float, beside: int = 0) -> None:
        """Record the read of a layer while ``beside`` bytes of other reads were in flight."""
        with self._lock:
            self._rates.setdefault(tier, ReadRate()).observe(nbytes, seconds, beside)

    def observe_prefill(self, cached: int, new: int, seconds: float) -> None:
        """Record a prefill of ``new`` rows over ``cached`` ones that did not wait for loads."""
        if self.profile is not None and new > 0 and seconds > 0:
            with self._lock:
                self.profile.observed(cached, new, seconds)

    def load_seconds(self, candidates: Sequence[Candidate]) -> float | None:
        """Time of all remaining reads together; None if a tier's speed is unknown."""
        seconds = 0.0
        with self._lock:
            for candidate in candidates:
                rate = self._rates.get(candidate.tier)
                if candidate.reads and (rate is None or rate.reads < MIN_READS):
                    return None
                seconds += rate.seconds(candidate.reads * candidate.nbytes) if rate is not None else 0.0
        return seconds

    def hides(self, candidates: Sequence[Candidate], cached: int, computed: int) -> bool:
        """Whether a prefill of ``computed`` rows that starts now does not wait for the remaining reads.

        Then at least L_p layers are read (Cache-Craft section 3.4). True where times are not known.
        """
        load = self.load_seconds(candidates)
        if self.profile is None or not load:
            return True
        layers = candidates[0].layers
        if any(candidate.reads == layers for candidate in candidates):
            return False  # the first layer is needed at once
        return load <= self.profile.seconds(cached, computed) * (layers - 1) / layers

    def choose(self, candidates: Sequence[Candidate], total: int, computed: int) -> list[bool]:
        """Which candidates to load: the quickest to load per spared row, as many as end the prefill soonest.

        ``total`` are the prompt's rows, ``computed`` those computed in any case.
        """
        alone = [self.load_seconds([candidate]) for candidate in candidates]
        if self.profile is None or not candidates or None in alone:
            return [True] * len(candidates)
        order = sorted(range(len(candidates)), key=lambda i: (alone[i] or 0) / max(candidates[i].rows, 1))
        computed += sum(candidate.recomputed for candidate in candidates)
        ends = []
        for count in range(len(order) + 1):
            load = sum(alone[i] or 0 for i in order[:count])
            rows = computed + sum(candidates[i].rows for i in order[count:])
            ends.append(pipelined(load, self.profile.seconds(total - rows, rows), candidates[0].layers))
        best = next(count for count, end in enumerate(ends) if end <= min(ends) * (1 + TIE))
        return [i in order[:best] for i in range(len(candidates))]


def pipelined(load: float, compute: float, layers: int) -> float:
    """Seconds of a prefill that computes layer by layer while later layers load."""
    return max(compute + load / layers, load + compute / layers)
