"""The ``in-prompt`` variants of every chunk: which there are, which fits best, which go (Cache-Craft 3.3)."""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ragcachekit.model.encoding import InPromptEncoding
from ragcachekit.plan.encodings import IN_PROMPT
from ragcachekit.plan.lookup import Entry, Fetch
from ragcachekit.plan.segments import Wanted
from ragcachekit.policies.base import SelectionPolicy, VariantPolicy
from ragcachekit.policies.craft.scores import Impact
from ragcachekit.store.base import Evictable, Found, KVStore, concerns
from ragcachekit.types import KVKey

HALF_LIFE = 1000
LEAST_COST = 0.05
"""A use counts 1 / cost; below this cost a variant is as good as can be."""

SHARE = 0.875
"""Of a store's bytes, what variants may take: they go by their worth before the store evicts by its rules."""

NEWCOMER = 1.0
"""f_r of a variant that was never used: as much as one use at full cost."""

RENEW_ABOVE = 0.25
"""A chunk whose best variant costs more than this gets another one, for the context at hand."""

Group = tuple[str, str]


class Recorded(Protocol):
    """KV, or an entry whose layers have not been read, with what was recorded beside it."""

    @property
    def tokens(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def sums(self) -> Mapping[str, torch.Tensor]: ...


@dataclass
class _Variant:
    impact: Impact
    weight: float
    at: int
    nbytes: int


@dataclass(frozen=True)
class Fit:
    """A variant and what it costs at a place: ``CCI (1 - β')``."""

    key: KVKey
    cost: float


class VariantPool:
    """The variants that a store has room for, shared among chunks by use.

    A chunk has as many variants as they earn: one popular chunk may hold most of the pool. Every use
    adds ``1 / max(CCI (1 - β'), 0.05)`` to a variant's worth f_r, which halves in ``half_life`` uses of
    its namespace, so that what was popular once does not stay for good. Thread safe.

    Only names are kept here; the KV lives in the store, by whose own rules it may go earlier. A variant that
    leaves the pool for another one of its namespace leaves the store too.

    Parameters
    ----------
    chunks, variants : int, optional
        N and M: at most so many variants per model and namespace, N times M. None: no such bound.
    half_life : int
        In uses.
    budget : int, optional
        Bytes of all variants together.
    free : callable
        Hears of each variant that has to make room, and drops its KV.
    """

    def __init__(
        self,
        chunks: int | None = None,
        variants: int = 1,
        half_life: int = HALF_LIFE,
        *,
        budget: int | None = None,
        free: Callable[[KVKey], object] = lambda _: None,
    ) -> None:
        if min(1 if chunks is None else chunks, variants, half_life) < 1:
            raise ValueError("chunks, variants and half_life must be at least 1")
        self.most = math.inf if chunks is None else chunks * variants
        self._half_life = half_life
        self._budget = math.inf if budget is None else budget
        self._nbytes = 0
        self._free = free
        self._lock = threading.Lock()
        self._known: defaultdict[Group, dict[KVKey, _Variant]] = defaultdict(dict)
        self._of: defaultdict[tuple[str, ...], dict[KVKey, None]] = defaultdict(dict)
        self._uses: defaultdict[Group, int] = defaultdict(int)

    def __len__(self) -> int:
        with self._lock:
            return sum(map(len, self._known.values()))

    def __contains__(self, key: KVKey) -> bool:
        with self._lock:
            return key in self._known.get(_group(key), ())

    def add(self, key: KVKey, kv: Recorded) -> None:
        """A variant that is in the store; the least worthy others of its namespace make room for it."""
        impact, group, freed = Impact.of(key.context, kv.sums, kv.tokens), _group(key), []
        with self._lock:
            known = self._known[group]
            if key in known:
                return
            while known and not self._fits(group, kv.nbytes):
                freed.append(min(known, key=lambda k: self._worth(known[k], group)))
                self._drop(freed[-1])
            known[key] = _Variant(impact, NEWCOMER, self._uses[group], kv.nbytes)
            self._nbytes += kv.nbytes
            self._of[_chunk(key)][key] = None
        for gone in freed:
            self._free(gone)

    def recall(self, key: KVKey, kv: Recorded) -> bool:
        """As :meth:`add` of what an earlier process left, if there is room; False if there is none."""
        with self._lock:
            if not self._fits(_group(key), kv.nbytes):
                return False
        self.add(key, kv)
        return True

    def ranked(self, key: KVKey, before: Sequence[str]) -> list[Fit]:
        """The variants of this chunk (in prompts of this kind), the cheapest behind ``before`` first."""
        with self._lock:
            known = self._known.get(_group(key), {})
            own = [(other, known[other].impact) for other in self._of.get(_chunk(key), ())]
        fits = [Fit(other, impact.cost(before)) for other, impact in own]
        return sorted(fits, key=lambda fit: fit.cost)

    def paths(self, key: KVKey, length: int) -> list[tuple[str, ...]]:
        """Beginnings of past prompts that end with a chunk and have ``length`` segments."""
        with self._lock:
            known = [k for k in self._known.get(_group(key), ()) if k.encoding == key.encoding]
        return [(*k.context, k.chunk_id) for k in known if len(k.context) == length - 1]

    def used(self, key: KVKey, before: Sequence[str]) -> None:
        """Count a use behind ``before``."""
        group = _group(key)
        with self._lock:
            variant = self._known.get(group, {}).get(key)
            if variant is None:
                return
            weight = self._worth(variant, group)
            self._uses[group] += 1
            variant.weight = weight + worth_at(variant.impact.cost(before))
            variant.at = self._uses[group]

    def weight(self, key: KVKey) -> float:
        """f_r as it stands; 0 for a variant that is not here."""
        with self._lock:
            variant = self._known.get(_group(key), {}).get(key)
            return 0.0 if variant is None else self._worth(variant, _group(key))

    def cost(self, key: KVKey, before: Sequence[str]) -> float:
        """CCI (1 - β') of a variant behind ``before``; of one that is not here, as of KV without sums."""
        with self._lock:
            variant = self._known.get(_group(key), {}).get(key)
            impact = Impact() if variant is None else variant.impact
        return impact.cost(before)

    def discard(self, key: KVKey) -> None:
        """The store has lost it."""
        with self._lock:
            self._drop(key)

    def forget(self, namespace: str, chunk_ids: frozenset[str] | None = None) -> None:
        """Drop what ``store.forget`` with the same arguments drops."""
        with self._lock:
            keys = [key for known in self._known.values() for key in known]
            for key in keys:
                if concerns(key, namespace, chunk_ids):
                    self._drop(key)

    def _drop(self, key: KVKey) -> None:
        gone = self._known.get(_group(key), {}).pop(key, None)
        self._nbytes -= 0 if gone is None else gone.nbytes
        of = self._of.get(_chunk(key), {})
        of.pop(key, None)
        if not of:
            self._of.pop(_chunk(key), None)

    def _fits(self, group: Group, nbytes: int) -> bool:
        return len(self._known[group]) < self.most and self._nbytes + nbytes <= self._budget

    def _worth(self, variant: _Variant, group: Group) -> float:
        age: float = (self._uses[group] - variant.at) / self._half_life
        return variant.weight * math.pow(0.5, age)


def open_pool(store: KVStore) -> VariantPool:
    """A pool of what a store has room for: :data:`SHARE` of its largest tier's bytes."""
    budget = int(SHARE * max((record.budget for record in store.stats()), default=0))
    return VariantPool(budget=budget, free=store.evict if isinstance(store, Evictable) else lambda _: None)


def recall(pool: VariantPool, store: KVStore, fingerprint: str) -> None:
    """Have the pool know what the store holds for a model, from its entries' headers; no layer is read."""
    for key in store.keys() if isinstance(store, Evictable) else ():
        if key.fingerprint != fingerprint or key.encoding.partition("@")[0] != IN_PROMPT:
            continue
        opened = store.open(key, 0.0)
        if opened is None:
            continue
        known = pool.recall(key, opened.kv if isinstance(opened, Found) else opened)
        if not isinstance(opened, Found):
            opened.close()
        if not known:
            return


def worth_at(cost: float) -> float:
    """What a use adds to f_r where CCI (1 - β') is ``cost`` (Cache-Craft section 3.3)."""
    return 1 / max(cost, LEAST_COST)


def look_up(
    wanted: Sequence[Wanted],
    policy: SelectionPolicy,
    store: KVStore | Fetch,
    pool: VariantPool | None,
) -> list[Entry | None]:
    """The entry to use for every wanted chunk, or None: that of its very context, else the best variant."""
    given = (
        policy.choose_variants(wanted, pool) if pool is not None and isinstance(policy, VariantPolicy) else {}
    )
    out = []
    fetch = store if isinstance(store, Fetch) else Fetch(store)
    for number, want in enumerate(wanted):
        key = given.get(number, want.key)
        found = fetch.get(key, len(want.token_ids), worth_at(_cost(key, want, pool)))
        entry = Entry(key, found) if found is not None else None
        if pool is not None and isinstance(want.encoding, InPromptEncoding):
            entry = _known(entry, pool, want) or _best(want, fetch, pool)
        out.append(entry)
    return out


def _cost(key: KVKey, want: Wanted, pool: VariantPool | None) -> float:
    """CCI (1 - β') of an entry that has not been looked up; 0 where it would be exact."""
    if want.exact and key == want.key:
        return 0.0
    return Impact().cost(want.before) if pool is None else pool.cost(key, want.before)


def _known(entry: Entry | None, pool: VariantPool, want: Wanted) -> Entry | None:
    if entry is not None:
        pool.add(entry.key, entry.found.kv)  # another process, or one before this, may have encoded it
        pool.used(entry.key, want.before)
    return entry


def _best(want: Wanted, fetch: Fetch, pool: VariantPool) -> Entry | None:
    for fit in pool.ranked(want.key, want.before):
        found = fetch.get(fit.key, len(want.token_ids), worth_at(fit.cost))
        if found is not None:
            pool.used(fit.key, want.before)
            return Entry(fit.key, found, renew=fit.cost > RENEW_ABOVE)
        pool.discard(fit.key)
    return None


def _group(key: KVKey) -> Group:
    return key.fingerprint, key.namespace


def _chunk(key: KVKey) -> tuple[str, ...]:
    return (*_group(key), key.encoding, key.chunk_id)
