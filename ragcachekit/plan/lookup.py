"""Find one prompt's entries, and begin to load those in slow tiers that are worth it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ragcachekit.model.layout import KVLayout, misfit
from ragcachekit.plan.load_planner import Candidate, LoadPlanner
from ragcachekit.plan.row_cost import RowCost, ScoringPass
from ragcachekit.store.base import KVStore
from ragcachekit.store.loading.load import Hit, LoadingKV
from ragcachekit.store.loading.loader import Loader
from ragcachekit.store.remote.deadlines import LookupBudget
from ragcachekit.types import KVKey

log = logging.getLogger(__name__)

MEMORY_TIERS = ("gpu", "host")
"""Tiers whose entries are there when they are found."""


@dataclass(frozen=True)
class Entry:
    """What the store has for a wanted chunk: ``found`` under ``key``; ``renew``: encode it here as well."""

    key: KVKey
    found: Hit
    renew: bool = False


@dataclass(frozen=True)
class Decision:
    """What to do with the entries of a prompt: None where rows are computed.

    ``skipped`` were found and are quicker to compute than to load; ``resident`` layers should be there before
    the forward begins, so that it then runs without gaps.
    """

    entries: tuple[Entry | None, ...]
    skipped: tuple[KVKey, ...] = ()
    resident: int = 0


class Fetch:
    """Looks entries up for one prompt, each once for all of its plans.

    All look-ups together wait at most three deadlines for a remote service; what would be asked of it
    after that is a miss.

    Parameters
    ----------
    store : KVStore or Loader
        From a bare store everything is read while it is looked up.
    planner : LoadPlanner, optional
        Says what is not worth loading; without one everything found is used.
    patience : Patience, optional
        What look-ups for this prompt may still take.
    layout : KVLayout, optional
        What KV of the model looks like: what does not look so is no hit, and leaves the store.
    """

    def __init__(
        self,
        store: KVStore | Loader,
        planner: LoadPlanner | None = None,
        lookup_budget: LookupBudget | None = None,
        layout: KVLayout | None = None,
    ) -> None:
        self._layout = layout
        self._store = store
        self._planner = planner
        self._patience = lookup_budget or LookupBudget()
        self._known: dict[KVKey, Hit | None] = {}
        self._lost: frozenset[KVKey] = frozenset()

    def get(self, key: KVKey, tokens: int, weight: float = 1.0) -> Hit | None:
        """What there is under ``key`` for that many tokens; layers in a slow tier are not being read yet.

        ``weight`` says how useful it would be, for eviction.
        """
        if key in self._lost:
            return None
        if key not in self._known:
            self._known[key] = self._fitting(key, self._look(key, weight), tokens)
        return self._known[key]

    def without(self, lost: frozenset[KVKey]) -> Fetch:
        """The same, where these are not found; both share what they look up."""
        if not lost:
            return self
        other = Fetch(self._store, self._planner, self._patience, self._layout)
        other._known, other._lost = self._known, lost
        return other

    def decide(
        self,
        entries: Sequence[Entry | None],
        use: Callable[[int], RowCost],
        total: int,
        computed: int,
        guide: ScoringPass | None = None,
    ) -> Decision:
        """Begin to load what is quicker to load than to compute; leave out the rest.

        ``use`` says what using the entry with this index means. ``total`` are the prompt's rows,
        ``computed`` those of which nothing is cached. ``guide`` is the policy's pass before the forward.
        """
        slow: dict[LoadingKV, list[int]] = {}
        for number, entry in enumerate(entries):
            if entry is not None and isinstance(entry.found.kv, LoadingKV):
                slow.setdefault(entry.found.kv, []).append(number)
        if not slow or not isinstance(self._store, Loader):
            return Decision(tuple(entries))
        if self._planner is None:
            wanted, resident = [True] * len(slow), 1
        else:
            candidates = [Candidate.of(kv, [use(i) for i in at]) for kv, at in slow.items()]
            waiting = {i for at in slow.values() for i in at}
            here = [use(i) for i, entry in enumerate(entries) if entry is not None and i not in waiting]
            computed += sum(other.recomputed for other in here)
            if guide is not None and any(not other.is_exact for other in here):
                guide = replace(guide, always=True)
            wanted, resident = self._planner.choose(candidates, total, computed, guide)
        unwanted = [kv for kv, load in zip(slow, wanted, strict=True) if not load]
        self._store.begin(kv for kv in slow if kv not in unwanted)
        self._store.release(unwanted)
        for kv in unwanted:
            self._known.pop(kv.key, None)  # given back: a later plan opens it anew
        left = [None if entry is not None and entry.found.kv in unwanted else entry for entry in entries]
        return Decision(tuple(left), tuple(kv.key for kv in unwanted), resident)

    def _fitting(self, key: KVKey, hit: Hit | None, tokens: int) -> Hit | None:
        reason = misfit(key, hit.kv, tokens, self._layout) if hit is not None else None
        if hit is None or reason is None:
            return hit
        log.warning("tier %s had an entry that is not used and leaves the store: %s", hit.tier, reason)
        try:
            with self._patience.held():
                self._store.discard(key)
        except Exception:  # a store of the user's own may fail, or be older than this method
            log.warning("the entry could not be dropped", exc_info=True)
        return None

    def _look(self, key: KVKey, weight: float) -> Hit | None:
        with self._patience.held():
            if isinstance(self._store, Loader):
                return self._store.open(key, weight)
            found = self._store.get(key, weight)
        return Hit(found.kv, found.tier) if found is not None else None
