"""Reading entries of slow tiers for prompts, or computing their rows: measured reads against prefills."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ragcachekit.config import LoadConfig
from ragcachekit.model.prefill_profile import PrefillProfile, measure_profile
from ragcachekit.policies.base import GuidedPolicy, LayerwisePolicy, PlacedChunk, SelectionPolicy
from ragcachekit.store.base import KVStore
from ragcachekit.store.loader import Loader, LoadingKV
from ragcachekit.threads import BackgroundWorker, JobQueue, flush_all
from ragcachekit.types import KVKey

MEMORY_TIERS = ("gpu", "host", "null")
"""Tiers whose entries need no loading."""

MIN_READS = 8
"""Reads before a tier's speed is trusted; until then everything is loaded, which measures it."""

TIE = 0.01
"""Relative difference below which times are equal; then the choice that computes more, as it is exact."""

NEEDED_AT = 0.25  # filled share of a cache from which on its entries' costs are measured
MAX_JOBS = 64  # prefetches that may wait; further ones are dropped

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
        spared, recomputed = sum(use.spared for use in uses), sum(use.recomputed for use in uses)
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


class PrefillCost:
    """Costs of a model's prefills, for eviction; 0 (unknown) until they are measured.

    They are needed once a share :data:`NEEDED_AT` of a cache is filled. ``context`` is the model's, in
    tokens.
    """

    def __init__(self, model: Any, *, context: int) -> None:
        self._model, self._context = model, context
        self.profile: PrefillProfile | None = None
        self._filled = 0.0
        self._tried = False
        self.needed = False
        """Whether it is time to :meth:`measure`."""

    def seconds(self, cached: int, new: int, share: float = 0.0) -> float:
        """Seconds of a prefill at the measured speed, or 0 if unknown.

        ``share`` is the part of a cache that the result takes.
        """
        if self.profile is None:
            self._filled += share
            self.needed = not self._tried and self._filled >= NEEDED_AT
            return 0.0
        # Without the current scale: entries are compared that came at other times.
        return self.profile.seconds(cached, new) / self.profile.scale

    def measure(self) -> None:
        """Measure the profile, unless that was tried before."""
        if self.profile is None and not self._tried:
            self._tried, self.needed = True, False
            self.profile = measure_profile(self._model, context=self._context)


class LoadPath:
    """Loads of one engine: ``source`` is a loader if the store has slow tiers, else the store itself."""

    def __init__(self, store: KVStore, config: LoadConfig, cost: PrefillCost) -> None:
        self.cost = cost
        self.source: KVStore | Loader = store
        self.planner: LoadPlanner | None = None
        self._worker = BackgroundWorker()
        self._jobs: JobQueue[Callable[[], object]] = self._worker.queue(lambda job: job(), MAX_JOBS)
        self._measured = False
        if all(record.tier in MEMORY_TIERS for record in store.stats()):
            return
        if config.when == "auto":
            self.planner = LoadPlanner()
        self.source = Loader(
            store,
            threads=config.threads,
            deadline=config.deadline,
            bytes_in_flight=config.bytes_in_flight,
            observe=self.planner.observe_read if self.planner is not None else lambda *_: None,
        )

    def prefetch(self, find: Callable[[], Iterable[KVKey]]) -> None:
        """Find keys and load those in slow tiers, both in the background."""
        loader = self.source
        if isinstance(loader, Loader):
            self._jobs.submit(lambda: loader.prefetch(find()))

    def hidden(self, keys: Callable[[], Iterable[KVKey]], rows: Callable[[], tuple[int, int]]) -> bool:
        """Whether a prefill of ``rows()``, cached and computed, need not wait for what is being loaded."""
        if self.planner is None or not isinstance(self.source, Loader):
            return True
        coming = [Candidate.of(kv, ()) for kv in self.source.coming(keys())]
        return not coming or self.planner.hides(coming, *rows())

    def learn(self, kept: int, computed: int, seconds: float | None) -> None:
        """Record how long a prefill over ``kept`` rows took, if that is known and it waited for no loads."""
        if self.planner is not None and seconds is not None:
            self.planner.observe_prefill(kept, computed, seconds)

    def follow(self, skipped: Sequence[KVKey], loaded_bytes: int) -> None:
        """Load what was computed instead, which keeps the measured speed current; measure prefills once."""
        if skipped:
            self.prefetch(lambda: skipped)
        loaded = self.planner is not None and self.planner.profile is None and loaded_bytes
        if (loaded or self.cost.needed) and not self._measured:
            self._measured = self._jobs.submit(self.measure)

    def measure(self) -> None:
        """Measure how long prefills take, in the caller's thread."""
        self.cost.measure()
        if self.planner is not None:
            self.planner.profile = self.cost.profile

    def forget(self, namespace: str, chunk_ids: frozenset[str] | None = None) -> None:
        """Drop loads of forgotten chunks; to be called after ``store.forget`` with the same arguments."""
        if isinstance(self.source, Loader):
            self.source.forget(namespace, chunk_ids)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait for all prefetches; False if ``timeout`` seconds did not suffice."""
        reads = [self.source.flush] if isinstance(self.source, Loader) else []
        return flush_all([self._worker.flush, *reads], timeout)

    def close(self) -> None:
        """End the threads and drop running reads."""
        if isinstance(self.source, Loader):
            self.source.close()  # first: a prefetch may wait for it
        self._worker.close()
