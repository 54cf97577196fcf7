"""Look-up of one prompt's entries, and the start of loads from slow tiers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace

from ragcachekit.model.encoding import AverageEncoding, InPromptEncoding
from ragcachekit.model.kv import SENSITIVITY, KVLayout, misfit
from ragcachekit.plan.encodings import Wanted
from ragcachekit.plan.load_planner import Candidate, LoadPlanner, RowCost
from ragcachekit.plan.variants import RENEW_ABOVE, StoredAverages, VariantPool, weight_at
from ragcachekit.store.base import KVStore
from ragcachekit.store.loader import Hit, Loader, LoadingKV
from ragcachekit.types import KVKey

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Entry:
    """A stored entry for a wanted chunk; ``renew``: encode the chunk in the present context as well.

    Of an entry of a whole chunk (``want``) whose part is in the prompt, rows from ``first`` on are used.
    """

    key: KVKey
    found: Hit
    renew: bool = False
    want: Wanted | None = None
    first: int = 0


@dataclass(frozen=True)
class Decision:
    """Entries to use, None where rows are computed; ``skipped`` are quicker to compute than to load."""

    entries: tuple[Entry | None, ...]
    skipped: tuple[KVKey, ...] = ()


class Fetch:
    """Look-ups for one prompt, each done once for all of its plans.

    A bare store reads everything during the look-up. Without a ``planner`` everything found is used.
    KV of another ``layout`` is a miss, and deleted from the store.
    """

    def __init__(
        self,
        store: KVStore | Loader,
        planner: LoadPlanner | None = None,
        layout: KVLayout | None = None,
    ) -> None:
        self._layout = layout
        self._store = store
        self._planner = planner
        self._known: dict[KVKey, Hit | None] = {}
        self._lost: frozenset[KVKey] = frozenset()

    def get(self, key: KVKey, tokens: int, weight: float = 1.0) -> Hit | None:
        """The entry under ``key`` for that many tokens; loads from slow tiers have not started.

        ``weight`` is its usefulness, for eviction.
        """
        if key in self._lost:
            return None
        if key not in self._known:
            self._known[key] = self._fitting(key, self._look(key, weight), tokens)
        return self._known[key]

    def without(self, lost: frozenset[KVKey]) -> Fetch:
        """A view in which these are not found; both share their results."""
        if not lost:
            return self
        other = copy(self)
        other._lost = lost
        return other

    def decide(
        self,
        entries: Sequence[Entry | None],
        use: Callable[[int], RowCost],
        total: int,
        computed: int,
    ) -> Decision:
        """Begin the loads that are quicker than computing; skip the others.

        ``use`` gives the row cost of an entry by index; ``total`` and ``computed`` are those of
        :meth:`.LoadPlanner.choose`.
        """
        slow: dict[LoadingKV, list[int]] = {}
        for number, entry in enumerate(entries):
            if entry is not None and isinstance(entry.found.kv, LoadingKV):
                slow.setdefault(entry.found.kv, []).append(number)
        if not slow or not isinstance(self._store, Loader):
            return Decision(tuple(entries))
        if self._planner is None:
            wanted = [True] * len(slow)
        else:
            candidates = [Candidate.of(kv, [use(i) for i in at]) for kv, at in slow.items()]
            waiting = {i for at in slow.values() for i in at}
            here = [use(i) for i, entry in enumerate(entries) if entry is not None and i not in waiting]
            computed += sum(other.recomputed for other in here)
            wanted = self._planner.choose(candidates, total, computed)
        unwanted = [kv for kv, load in zip(slow, wanted, strict=True) if not load]
        self._store.begin(kv for kv in slow if kv not in unwanted)
        self._store.release(unwanted)
        for kv in unwanted:
            self._known.pop(kv.key, None)  # released: a later plan opens it again
        left = [None if entry is not None and entry.found.kv in unwanted else entry for entry in entries]
        return Decision(tuple(left), tuple(kv.key for kv in unwanted))

    def _fitting(self, key: KVKey, hit: Hit | None, tokens: int) -> Hit | None:
        reason = misfit(key, hit.kv, tokens, self._layout) if hit is not None else None
        if hit is None or reason is None:
            return hit
        log.warning("tier %s had an entry that is not used and leaves the store: %s", hit.tier, reason)
        try:
            self._store.discard(key)
        except Exception:  # a user's own store may fail, or lack this method
            log.warning("the entry could not be dropped", exc_info=True)
        return None

    def _look(self, key: KVKey, weight: float) -> Hit | None:
        if isinstance(self._store, Loader):
            return self._store.open(key, weight)
        found = self._store.get(key, weight)
        return Hit(found.kv, found.tier) if found is not None else None


def find_entries(wanted: Sequence[Wanted], fetch: Fetch, pool: VariantPool) -> list[Entry | None]:
    """For every wanted chunk the entry of exactly its context, else the best one of another, or None.

    For a chunk that is in the prompt in part, rows of the whole chunk serve where none of just that part
    are stored, or only a prompt's own rows.
    """
    entries = []
    for want in wanted:
        entry = _find(want, fetch, pool)
        if want.whole is not None and (entry is None or entry.renew):
            whole = _find(want.whole, fetch, pool)
            if whole is not None and (entry is None or not whole.renew):
                entry = replace(whole, want=want.whole, first=want.first)
        entries.append(entry)
    return entries


def _find(want: Wanted, fetch: Fetch, pool: VariantPool) -> Entry | None:
    cost = 0.0 if want.exact else pool.cost(want.key, want.before)
    found = fetch.get(want.key, len(want.token_ids), weight_at(cost))
    entry = Entry(want.key, found) if found is not None else None
    if isinstance(want.encoding, InPromptEncoding):
        if entry is None:
            return _best(want, fetch, pool)
        pool.add(entry.key, entry.found.kv)  # an earlier or other process may have encoded it
        pool.used(entry.key, want.before)
    elif entry is None or (want.in_place and not isinstance(want.encoding, AverageEncoding)):
        # A chunk whose companions are not known is named as after the system text alone.
        return _average(want, fetch, pool.averages) or entry or _plain(want, fetch)
    return entry


def keys_for(want: Wanted, pool: VariantPool) -> list[KVKey]:
    """Keys under which :func:`find_entries` may find an entry for a wanted chunk."""
    whole = keys_for(want.whole, pool) if want.whole is not None else []
    if isinstance(want.encoding, InPromptEncoding):
        return [want.key, *pool.of(want.key), *whole]
    mean = pool.averages.find(want.average) if want.average is not None else None
    return [want.key, *(key for key in (mean, want.plain) if key is not None), *whole]


def _average(want: Wanted, fetch: Fetch, averages: StoredAverages) -> Entry | None:
    """Mean KV after other chunks, or a prompt's own rows; the latter are to be replaced by a mean."""
    key = averages.find(want.average) if want.average is not None else None
    if key is None:
        return None
    found = fetch.get(key, len(want.token_ids))
    if found is None:
        averages.discard(key)
        return None
    is_mean = SENSITIVITY in found.kv.sums
    return Entry(key, found, want.exact or (isinstance(want.encoding, AverageEncoding) and not is_mean))


def _plain(want: Wanted, fetch: Fetch) -> Entry | None:
    """KV after the system text alone, until the mean is stored."""
    found = fetch.get(want.plain, len(want.token_ids)) if want.plain is not None else None
    return Entry(want.plain, found, renew=True) if want.plain is not None and found is not None else None


def _best(want: Wanted, fetch: Fetch, pool: VariantPool) -> Entry | None:
    for fit in pool.ranked(want.key, want.before):
        found = fetch.get(fit.key, len(want.token_ids), weight_at(fit.cost))
        if found is not None:
            pool.used(fit.key, want.before)
            return Entry(fit.key, found, renew=fit.cost > RENEW_ABOVE)
        pool.discard(fit.key)
    return None
