"""The load path of one engine: prefetching, the loader, and the planner of loads."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ragcachekit.background import BackgroundWorker, JobQueue, flush_all
from ragcachekit.config import LoadConfig
from ragcachekit.generate.run import Generated
from ragcachekit.model.kv import KVLayout
from ragcachekit.model.prefill_profile import PrefillCost
from ragcachekit.plan.link_plan import LinkPlan
from ragcachekit.plan.load_planner import Candidate, LoadPlanner
from ragcachekit.plan.lookup import MEMORY_TIERS, Fetch
from ragcachekit.store.base import KVStore
from ragcachekit.store.loader import Loader
from ragcachekit.types import KVKey

MAX_JOBS = 64  # prefetches that may wait; further ones are dropped


class LoadPath:
    """Reads entries of slow tiers for prompts, planned by measured times of loads and prefills."""

    def __init__(self, store: KVStore, config: LoadConfig, *, cost: PrefillCost, layout: KVLayout) -> None:
        self._layout = layout
        self.cost = cost
        self._slow = any(record.tier not in (*MEMORY_TIERS, "null") for record in store.stats())
        self.planner: LoadPlanner | None = None
        if config.when == "auto" and self._slow:
            self.planner = LoadPlanner(cost.profile)
        self._loader = Loader(
            store,
            threads=config.threads,
            deadline=config.deadline,
            bytes_in_flight=config.bytes_in_flight,
            observe=self.planner.observe_read if self.planner is not None else lambda *_: None,
        )
        self._worker = BackgroundWorker()
        self._jobs: JobQueue[Callable[[], object]] = self._worker.queue(lambda job: job(), MAX_JOBS)
        self._measured = False

    def fetch(self) -> Fetch:
        """The search for one prompt's entries."""
        return Fetch(self._loader, self.planner, layout=self._layout)

    def prefetch(self, find: Callable[[], Iterable[KVKey]]) -> None:
        """Find keys and load those in slow tiers, both in the background."""
        if self._slow:
            self._jobs.submit(lambda: self._loader.prefetch(find()))

    def hidden(self, keys: Callable[[], Iterable[KVKey]], rows: Callable[[], tuple[int, int]]) -> bool:
        """Whether a prefill of ``rows()``, cached and computed, need not wait for what is being loaded."""
        if self.planner is None:
            return True
        coming = [Candidate.of(kv, ()) for kv in self._loader.coming(keys())]
        return not coming or self.planner.hides(coming, *rows())

    def learn(self, generated: Generated) -> None:
        """Record how long an answer's prefill took, and :meth:`follow` its plan."""
        plan = generated.plan
        if self.planner is not None and generated.prefill is not None:
            self.planner.observe_prefill(plan.kept, len(plan.rows), generated.prefill)
        self.follow(plan)

    def follow(self, plan: LinkPlan) -> None:
        """Load what was computed instead, which keeps the measured speed current; measure prefills once."""
        if self.planner is not None and plan.skipped:
            self.prefetch(lambda: plan.skipped)
        loaded = self.planner is not None and self.planner.profile is None and plan.report.loaded_bytes
        if (loaded or self.cost.needed) and not self._measured:
            self._measured = self._jobs.submit(self.measure)

    def measure(self) -> None:
        """Measure how long prefills take, in the caller's thread."""
        self.cost.measure()
        if self.planner is not None:
            self.planner.profile = self.cost.profile

    def forget(self, namespace: str, chunk_ids: frozenset[str] | None = None) -> None:
        """Drop loads of forgotten chunks; to be called after ``store.forget`` with the same arguments."""
        self._loader.forget(namespace, chunk_ids)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait for all prefetches; False if ``timeout`` seconds did not suffice."""
        return flush_all([self._worker.flush, self._loader.flush], timeout)

    def close(self) -> None:
        """End the threads and drop running reads."""
        self._loader.close()  # first: a prefetch may wait for it
        self._worker.close()


def load_config(load: str | LoadConfig) -> LoadConfig:
    """The configuration, given in full or by its first field."""
    return load if isinstance(load, LoadConfig) else LoadConfig(load)  # type: ignore[arg-type]
