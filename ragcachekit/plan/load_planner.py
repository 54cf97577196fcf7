"""Entries of slow tiers: read for a prompt, or computed instead, by measured reads and prefills."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch

from ragcachekit.config import LoadConfig
from ragcachekit.model.prefill_profile import PrefillCost
from ragcachekit.policies.base import GuidedPolicy, LayerwisePolicy, PlacedChunk, SelectionPolicy
from ragcachekit.store.base import KVStore
from ragcachekit.store.loader import Loader, LoadingKV
from ragcachekit.threads import DaemonPool, Job, attempt, flush_all
from ragcachekit.types import KVKey

MEMORY_TIERS = ("gpu", "host", "null")
"""Tiers whose entries need no loading."""

MIN_READS = 8
"""Reads before a tier's speed is trusted; until then everything is loaded, which measures it."""

TIE = 0.01
"""Relative difference below which times are equal; then the choice that computes more, as it is exact."""

MAX_JOBS = 64  # prefetches that may wait; further ones are dropped

_FADING = 0.99  # weight of a read relative to the next one: about a hundred reads count
_MAX_SLOWER = 8.0  # longest time that counts, relative to the expected one: a read that hung predicts little


def recomputed_rows(policy: SelectionPolicy, chunk: PlacedChunk, layers: int) -> int:
    """Rows of a cached chunk that ``policy`` recomputes; 0 for a layer-wise one, which drops rows later."""
    if chunk.is_exact or isinstance(policy, LayerwisePolicy):
        return 0
    if isinstance(policy, GuidedPolicy):
        # The question decides which rows, not how many.
        watched = layers if policy.look.layers is None else len(policy.look.layers)
        return len(policy.choose([chunk], [torch.ones(chunk.stop)] * watched))
    return len(policy.select([chunk]))


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

    Everything is loaded until ``cost`` has a profile.
    """

    def __init__(self, cost: PrefillCost) -> None:
        self.cost = cost
        self._rates: dict[str, ReadRate] = {}
        self._lock = threading.Lock()

    def observe_read(self, tier: str, nbytes: int, seconds: float, beside: int = 0) -> None:
        """Record the read of a layer while ``beside`` bytes of other reads were in flight."""
        with self._lock:
            self._rates.setdefault(tier, ReadRate()).observe(nbytes, seconds, beside)

    def load_seconds(self, kvs: Sequence[LoadingKV]) -> float | None:
        """Time of all remaining reads together; None if a tier's speed is unknown."""
        seconds = 0.0
        with self._lock:
            for kv in kvs:
                rate, reads = self._rates.get(kv.tier), kv.layers - kv.ready
                if reads and (rate is None or rate.reads < MIN_READS):
                    return None
                seconds += rate.seconds(reads * kv.nbytes / kv.layers) if rate is not None else 0.0
        return seconds

    def hides(self, kvs: Sequence[LoadingKV], cached: int, computed: int) -> bool:
        """Whether a prefill of ``computed`` rows that starts now does not wait for the remaining reads.

        Then at least L_p layers are read (Cache-Craft section 3.4). True where times are not known.
        """
        load = self.load_seconds(kvs)
        if self.cost.profile is None or not load:
            return True
        layers = kvs[0].layers
        if not all(kv.ready for kv in kvs):
            return False  # the first layer is needed at once
        return load <= self.cost.profile.seconds(cached, computed) * (layers - 1) / layers

    def choose(
        self, kvs: Sequence[LoadingKV], spared: Sequence[int], total: int, computed: int
    ) -> list[bool]:
        """Which entries to load: the quickest per ``spared`` row, as many as end the prefill soonest.

        ``total`` are the prompt's rows, ``computed`` those that are computed where all are loaded.
        """
        alone = [self.load_seconds([kv]) for kv in kvs]
        if self.cost.profile is None or not kvs or None in alone:
            return [True] * len(kvs)
        order = sorted(range(len(kvs)), key=lambda i: (alone[i] or 0) / max(spared[i], 1))
        ends = []
        for count in range(len(order) + 1):
            load = sum(alone[i] or 0 for i in order[:count])
            rows = computed + sum(spared[i] for i in order[count:])
            ends.append(pipelined(load, self.cost.profile.seconds(total - rows, rows), kvs[0].layers))
        best = next(count for count, end in enumerate(ends) if end <= min(ends) * (1 + TIE))
        return [i in order[:best] for i in range(len(kvs))]


def pipelined(load: float, compute: float, layers: int) -> float:
    """Seconds of a prefill that computes layer by layer while later layers load."""
    return max(compute + load / layers, load + compute / layers)


class LoadPath:
    """Loads of an engine whose store has slow tiers. ``loader`` reads them, also ahead of requests."""

    def __init__(self, store: KVStore, config: LoadConfig, cost: PrefillCost) -> None:
        self.planner = LoadPlanner(cost) if config.when == "auto" else None
        self.loader = Loader(
            store,
            threads=config.threads,
            deadline=config.deadline,
            bytes_in_flight=config.bytes_in_flight,
            observe=self.planner.observe_read if self.planner is not None else lambda *_: None,
        )
        self._pool = DaemonPool("ragcachekit-prefetch")

    def prefetch(self, find: Callable[[], Iterable[KVKey]]) -> None:
        """Find keys and load those in slow tiers, both in the background."""
        self._pool.submit(Job(partial(attempt, lambda: self.loader.prefetch(find()))), MAX_JOBS)

    def hidden(self, keys: Callable[[], Iterable[KVKey]], rows: Callable[[], tuple[int, int]]) -> bool:
        """Whether a prefill of ``rows()``, cached and computed, need not wait for what is being loaded."""
        coming = self.loader.coming(keys()) if self.planner is not None else ()
        return self.planner is None or not coming or self.planner.hides(coming, *rows())

    def follow(self, skipped: Sequence[KVKey], loaded_bytes: int) -> None:
        """Load what was computed instead, which keeps the measured speed current; measure prefills once."""
        if skipped:
            self.prefetch(lambda: skipped)
        if self.planner is not None and loaded_bytes:
            self.planner.cost.measure_later()

    def flush(self, timeout: float | None = None) -> bool:
        """Wait for all prefetches; False if ``timeout`` seconds did not suffice."""
        return flush_all([self._pool.flush, self.loader.flush], timeout)

    def close(self) -> None:
        self.loader.close()  # first: a prefetch may wait for it
        self._pool.close()


def open_loads(store: KVStore, config: LoadConfig, cost: PrefillCost) -> LoadPath | None:
    """Loads of a store with slow tiers; None for one in memory alone."""
    return None if all(one.tier in MEMORY_TIERS for one in store.stats()) else LoadPath(store, config, cost)
