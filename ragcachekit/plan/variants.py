"""Stored entries that serve in more than one context: ``in-prompt`` variants (Cache-Craft 3.3), and means."""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ragcachekit.plan.encodings import IN_PROMPT
from ragcachekit.policies.craft import Impact
from ragcachekit.store.base import Found, KVStore, LayerSource, concerns
from ragcachekit.store.loader import AnyKV
from ragcachekit.types import KVKey

HALF_LIFE = 1000
"""Uses in a namespace after which the weight of a variant has halved."""

MIN_COST = 0.05
"""A use counts 1 / cost; lower costs count as this one."""

SHARE = 0.875
"""Share of a store's bytes for variants: the pool evicts by weight before the store evicts by its policy."""

NEW_WEIGHT = 1.0
"""f_r of an unused variant: that of one use at full cost."""

RENEW_ABOVE = 0.25
"""A chunk whose best variant costs more is encoded again in the present context."""


_KIND = "average:"

MAX_AVERAGES = 1 << 18
"""Entries known in all namespaces together, about 250 MB; the least recently used are dropped."""


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


class StoredAverages:
    """Keys of stored entries by model, namespace, chunk and system text, the latest of each; thread safe.

    The chunks that take part in a mean are chosen when it is encoded, and may be others in the next process.
    ``allow`` returns whether the entry of a key may serve.
    """

    def __init__(self) -> None:
        self.allow: Callable[[KVKey], bool] = lambda _: True
        self._lock = threading.Lock()
        self._keys: dict[tuple[str, ...], KVKey] = {}

    def add(self, key: KVKey) -> KVKey | None:
        """Record a stored entry; returns the key that it replaces. Those of other encoders are left out."""
        if not key.encoding.startswith(_KIND):
            return None
        with self._lock:
            replaced = self._keys.pop(_averaged(key), None)
            self._keys[_averaged(key)] = key
            if len(self._keys) > MAX_AVERAGES:  # a store does not report what it evicts
                del self._keys[next(iter(self._keys))]
        return replaced if replaced != key else None

    def recall(self, keys: Iterable[KVKey]) -> None:
        """Record what a store holds, the latest first."""
        for key in reversed(list(keys)):
            self.add(key)

    def find(self, key: KVKey) -> KVKey | None:
        """A stored entry for the chunk of ``key`` and the system text that its context begins with."""
        with self._lock:
            found = self._keys.pop(_averaged(key), None)
            if found is not None:
                self._keys[_averaged(key)] = found
        return found if found is not None and self.allow(found) else None

    def stored_for(self, key: KVKey) -> KVKey | None:
        """What :meth:`add` would replace, or ``key`` itself; None for keys of other encoders."""
        return self.find(key) if key.encoding.startswith(_KIND) else None

    def discard(self, key: KVKey) -> None:
        """Remove an entry that the store has lost."""
        with self._lock:
            if self._keys.get(_averaged(key)) == key:
                del self._keys[_averaged(key)]

    def forget(self, namespace: str, chunk_ids: frozenset[str] | None = None) -> None:
        """Drop what ``store.forget`` with the same arguments drops."""
        with self._lock:
            kept = {g: key for g, key in self._keys.items() if not concerns(key, namespace, chunk_ids)}
            self._keys = kept


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
    return 1 / max(cost, MIN_COST)


def _group(key: KVKey) -> tuple[str, str]:
    return key.fingerprint, key.namespace


def _chunk(key: KVKey) -> tuple[str, ...]:
    return (*_group(key), key.encoding, key.chunk_id)


def _averaged(key: KVKey) -> tuple[str, ...]:
    return key.fingerprint, key.namespace, key.chunk_id, key.context[0]
