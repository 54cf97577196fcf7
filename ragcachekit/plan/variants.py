"""Pool of ``in-prompt`` variants of chunks, and the look-up of a prompt's entries (Cache-Craft 3.3)."""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ragcachekit.model.encoding import AverageEncoding, InPromptEncoding
from ragcachekit.model.kv import SENSITIVITY
from ragcachekit.plan.encodings import IN_PROMPT, Wanted
from ragcachekit.plan.lookup import Entry, Fetch
from ragcachekit.plan.stored_averages import StoredAverages
from ragcachekit.policies.craft import Impact
from ragcachekit.store.base import Found, KVStore, LayerSource, concerns
from ragcachekit.store.load import AnyKV
from ragcachekit.types import KVKey

HALF_LIFE = 1000
"""Uses in a namespace after which the weight of a variant has halved."""

LEAST_COST = 0.05
"""A use counts 1 / cost; lower costs count as this one."""

SHARE = 0.875
"""Share of a store's bytes for variants: the pool evicts by weight before the store evicts by its policy."""

NEW_WEIGHT = 1.0
"""f_r of an unused variant: that of one use at full cost."""

RENEW_ABOVE = 0.25
"""A chunk whose best variant costs more is encoded again in the present context."""


@dataclass
class _Variant:
    impact: Impact
    weight: float  # f_r after use number ``at`` of its namespace
    at: int
    nbytes: int


@dataclass(frozen=True)
class Fit:
    """A variant and its cost in a context: ``CCI (1 - β')``."""

    key: KVKey
    cost: float


class VariantPool:
    """Keys of the variants in a store, shared among chunks by use: a popular chunk may take most of it.

    Every use adds ``1 / max(CCI (1 - β'), 0.05)`` to a variant's weight f_r, which halves in
    :data:`HALF_LIFE` uses of its namespace. Thread safe. The store may evict an entry earlier.

    ``budget`` are bytes of all variants together, without a limit by default. ``free`` is called with each
    variant that is evicted, to delete its KV.
    """

    def __init__(
        self, *, budget: int | None = None, free: Callable[[KVKey], object] = lambda _: None
    ) -> None:
        self._budget = math.inf if budget is None else budget
        self._nbytes = 0
        self.averages = StoredAverages()
        self._free = free
        self._lock = threading.RLock()
        self._variants: dict[KVKey, _Variant] = {}
        self._of: defaultdict[tuple[str, ...], dict[KVKey, None]] = defaultdict(dict)  # by chunk
        self._uses: defaultdict[tuple[str, str], int] = defaultdict(int)  # by namespace

    def add(self, key: KVKey, kv: AnyKV | LayerSource, *, evict: bool = True) -> bool:
        """Add a stored variant in place of the least used of its namespace.

        Not ``evict``: False, and nothing changes, if there is no room.
        """
        impact, group, freed = Impact.of(key.context, kv.sums, kv.tokens), _group(key), []
        with self._lock:
            if key in self._variants:
                return True
            while self._nbytes + kv.nbytes > self._budget:
                if not evict:
                    return False
                rivals = [other for other in self._variants if _group(other) == group]
                if not rivals:
                    break
                freed.append(min(rivals, key=self.weight))
                self.discard(freed[-1])
            self._variants[key] = _Variant(impact, NEW_WEIGHT, self._uses[group], kv.nbytes)
            self._nbytes += kv.nbytes
            self._of[_chunk(key)][key] = None
        for evicted in freed:
            self._free(evicted)
        return True

    def ranked(self, key: KVKey, before: Sequence[str]) -> list[Fit]:
        """The variants of this chunk (under this encoding), the cheapest after ``before`` first."""
        with self._lock:
            own = [(other, self._variants[other].impact) for other in self._of.get(_chunk(key), ())]
        fits = [Fit(other, impact.cost(before)) for other, impact in own]
        return sorted(fits, key=lambda fit: fit.cost)

    def of(self, key: KVKey) -> list[KVKey]:
        """The variants of this chunk (under this encoding), in no order."""
        with self._lock:
            return list(self._of.get(_chunk(key), ()))

    def used(self, key: KVKey, before: Sequence[str]) -> None:
        """Count a use after ``before``."""
        with self._lock:
            variant = self._variants.get(key)
            if variant is not None:
                variant.weight = self.weight(key) + weight_at(variant.impact.cost(before))
                self._uses[_group(key)] += 1
                variant.at = self._uses[_group(key)]

    def weight(self, key: KVKey) -> float:
        """Present f_r; 0 for an unknown variant."""
        with self._lock:
            variant = self._variants.get(key)
            if variant is None:
                return 0.0
            return variant.weight * math.pow(0.5, (self._uses[_group(key)] - variant.at) / HALF_LIFE)

    def cost(self, key: KVKey, before: Sequence[str]) -> float:
        """CCI (1 - β') of a variant after ``before``; an unknown one counts as KV without sums."""
        with self._lock:
            variant = self._variants.get(key)
        return (Impact() if variant is None else variant.impact).cost(before)

    def discard(self, key: KVKey) -> None:
        """Remove a variant that the store has lost."""
        with self._lock:
            variant = self._variants.pop(key, None)
            if variant is not None:
                self._nbytes -= variant.nbytes
                del self._of[_chunk(key)][key]
                if not self._of[_chunk(key)]:
                    del self._of[_chunk(key)]

    def forget(self, namespace: str, chunk_ids: frozenset[str] | None = None) -> None:
        """Drop what ``store.forget`` with the same arguments drops, of ``averages`` as well."""
        self.averages.forget(namespace, chunk_ids)
        with self._lock:
            for key in [key for key in self._variants if concerns(key, namespace, chunk_ids)]:
                self.discard(key)


def open_pool(store: KVStore) -> VariantPool:
    """A pool with :data:`SHARE` of the bytes of a store's largest tier."""
    budget = int(SHARE * max((record.budget for record in store.stats()), default=0))
    return VariantPool(budget=budget, free=store.evict)


def recall(pool: VariantPool, store: KVStore, fingerprint: str) -> None:
    """Add what the store holds for a model, from its entries' headers; no layer is read."""
    stored = store.keys()
    for key in stored:
        if key.fingerprint != fingerprint or key.encoding.partition("@")[0] != IN_PROMPT:
            continue
        opened = store.open(key, 0.0)
        if opened is None:
            continue
        has_room = pool.add(key, opened.kv if isinstance(opened, Found) else opened, evict=False)
        if not isinstance(opened, Found):
            opened.close()
        if not has_room:
            return


def weight_at(cost: float) -> float:
    """What a use adds to f_r where CCI (1 - β') is ``cost`` (Cache-Craft section 3.3)."""
    return 1 / max(cost, LEAST_COST)


def look_up(wanted: Sequence[Wanted], fetch: Fetch, pool: VariantPool) -> list[Entry | None]:
    """For every wanted chunk the entry of exactly its context, else the best one of another, or None.

    For a chunk that stands in the prompt in part, rows of the whole chunk serve where none of just that part
    are stored, or only a prompt's own rows.
    """
    entries = []
    for want in wanted:
        entry = _look_up(want, fetch, pool)
        if want.whole is not None and (entry is None or entry.renew):
            whole = _look_up(want.whole, fetch, pool)
            if whole is not None and (entry is None or not whole.renew):
                entry = replace(whole, want=want.whole, first=want.first)
        entries.append(entry)
    return entries


def _look_up(want: Wanted, fetch: Fetch, pool: VariantPool) -> Entry | None:
    cost = 0.0 if want.exact else pool.cost(want.key, want.before)
    found = fetch.get(want.key, len(want.token_ids), weight_at(cost))
    entry = Entry(want.key, found) if found is not None else None
    if isinstance(want.encoding, InPromptEncoding):
        if entry is None:
            return _best(want, fetch, pool)
        pool.add(entry.key, entry.found.kv)  # an earlier or other process may have encoded it
        pool.used(entry.key, want.before)
    elif entry is None or (want.in_place and not isinstance(want.encoding, AverageEncoding)):
        # A chunk whose companions are not known is named as behind the system text alone.
        return _average(want, fetch, pool.averages) or entry or _plain(want, fetch)
    return entry


def keys_for(want: Wanted, pool: VariantPool) -> list[KVKey]:
    """Keys under which :func:`look_up` may find an entry for a wanted chunk."""
    whole = keys_for(want.whole, pool) if want.whole is not None else []
    if isinstance(want.encoding, InPromptEncoding):
        return [want.key, *pool.of(want.key), *whole]
    mean = pool.averages.find(want.average) if want.average is not None else None
    return [want.key, *(key for key in (mean, want.plain) if key is not None), *whole]


def _average(want: Wanted, fetch: Fetch, averages: StoredAverages) -> Entry | None:
    """Mean KV behind other chunks, or a prompt's own rows; the latter are to be replaced by a mean."""
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
    """KV behind the system text alone, until the mean is stored."""
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


def _group(key: KVKey) -> tuple[str, str]:
    return key.fingerprint, key.namespace


def _chunk(key: KVKey) -> tuple[str, ...]:
    return (*_group(key), key.encoding, key.chunk_id)
