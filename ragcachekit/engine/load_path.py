"""The load path of one engine: the loader, the planner of loads, and what both learn from answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ragcachekit.background import Background, flush_all
from ragcachekit.config import LoadConfig
from ragcachekit.generate.run import Generated
from ragcachekit.model.layout import KVLayout
from ragcachekit.model.prefill_timing import PrefillCost
from ragcachekit.plan.link_plan import LinkPlan
from ragcachekit.plan.load_planner import LoadPlanner
from ragcachekit.plan.lookup import MEMORY_TIERS, Fetch
from ragcachekit.store.base import KVStore
from ragcachekit.store.loading.loader import Loader
from ragcachekit.types import KVKey

MOST_JOBS = 64
"""Calls of prefetch that may wait; later ones are left out."""


class LoadPath:
    """Loading in the background, planned by how long loads and prefills take, and prefetching.

    Parameters
    ----------
    store : KVStore
    config : LoadConfig
    cost : PrefillCost
        How long prefills take.
    layout : KVLayout
        What its KV looks like.
    """

    def __init__(
        self,
        store: KVStore,
        config: LoadConfig,
        *,
        cost: PrefillCost,
        layout: KVLayout,
    ) -> None:
        self._layout = layout
        self.cost = cost
        self._slow = any(record.tier not in (*MEMORY_TIERS, "null") for record in store.stats())
        self.planner: LoadPlanner | None = None
        if config.when == "auto" and self._slow:
            self.planner = LoadPlanner(cost.profile, config.threads)
        self._loader = Loader(
            store,
            threads=config.threads,
            deadline=config.deadline,
            bytes_in_flight=config.bytes_in_flight,
            observe=self.planner.observe_read if self.planner is not None else lambda *_: None,
        )
        self._jobs = Background[Callable[[], object]](lambda job: job(), MOST_JOBS, "ragcachekit-prefetch")
        self._measured = False

    def fetch(self) -> Fetch:
        """How one prompt's entries are found."""
        return Fetch(self._loader, self.planner, layout=self._layout)

    def prefetch(self, find: Callable[[], Iterable[KVKey]]) -> None:
        """Load what ``find`` will name, if it lies in a slow tier; both happen in the background."""
        if self._slow:
            self._jobs.submit(lambda: self._loader.prefetch(find()))

    def learn(self, generated: Generated) -> None:
        """After an answer: note how long its prefill took, and :meth:`follow` its plans."""
        plan = generated.plans[0]
        if self.planner is not None and generated.prefill is not None:
            self.planner.observe_prefill(plan.kept, len(plan.rows), generated.prefill)
        self.follow(generated.plans)

    def follow(self, plans: Sequence[LinkPlan]) -> None:
        """Load now what was quicker to compute than to load; measure prefills, where that is still to do.

        Loading keeps the tier's speed current, and brings entries into a faster tier where there is one.
        """
        if self.planner is not None:
            self._loader.prefetch(key for plan in plans for key in plan.skipped)
        unknown = self.planner is not None and self.planner.profile is None
        loaded = unknown and any(plan.loads for plan in plans)
        if (loaded or self.cost.needed) and not self._measured:
            self._measured = self._jobs.submit(self.measure)

    def measure(self) -> None:
        """Have it known how long prefills take; measures in the caller's thread."""
        self.cost.measure()
        if self.planner is not None:
            self.planner.profile = self.cost.profile

    def forget(self, namespace: str, chunk_ids: frozenset[str] | None = None) -> None:
        """Give up what ``store.forget`` with the same arguments was about; call it after that."""
        self._loader.forget(namespace, chunk_ids)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait for everything prefetched; False if ``timeout`` seconds did not suffice."""
        return flush_all([self._jobs.flush, self._loader.flush], timeout)

    def close(self) -> None:
        """End the threads; what is being read is given up."""
        self._jobs.close()
        self._loader.close()


def load_config(load: str | LoadConfig) -> LoadConfig:
    """``"auto"`` or ``"always"`` alone stands for its configuration."""
    return load if isinstance(load, LoadConfig) else LoadConfig(load)  # type: ignore[arg-type]
