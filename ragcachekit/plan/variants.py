"""Stored entries that serve after other text than their own: Cache-Craft's variants, and means."""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ragcachekit.json_store import JsonStore
from ragcachekit.policies.craft import NO_IMPACT, Impact
from ragcachekit.store.base import Found, KVStore, LayerSource, concerns
from ragcachekit.store.loader import AnyKV
from ragcachekit.threads import attempt
from ragcachekit.types import KVKey

IN_PROMPT = "in-prompt"

HALF_LIFE = 1000  # uses in a namespace after which the weight of a variant has halved
MIN_COST = 0.05  # a use counts 1 / cost; lower costs count as this one
SHARE = 0.875  # of a store's bytes for variants: the pool evicts by weight before the store by its policy
NEW_WEIGHT = 1.0  # f_r of an unused variant: that of one use at full cost
MAX_AVERAGES = 1 << 18  # entries in all namespaces together, about 250 MB, those used last


@dataclass
class _Variant:
    impact: Impact
    weight: float  # f_r after use number ``at`` of its namespace
    at: int
    nbytes: int


class Fit(NamedTuple):
    """A variant and its cost in a context: ``CCI (1 - β')``."""

    key: KVKey
    cost: float


class VariantPool:
    """Stored entries that serve in other contexts than their own: ``in-prompt`` variants, and means.

    Variants (Cache-Craft section 3.3) share ``budget`` bytes by use: a weight f_r, which halves in
    :data:`HALF_LIFE` uses of their namespace. ``free`` is called with each that is evicted, to delete its KV.
    With ``saved``, weights and numbers of uses outlive the process. Of ``average:n`` entries the latest is
    known for each chunk and system text; ``allow`` returns whether it may serve.
    """

    def __init__(
        self,
        *,
        budget: float = math.inf,
        free: Callable[[KVKey], object] = lambda _: None,
        allow: Callable[[KVKey], bool] = lambda _: True,
    ) -> None:
        self._budget, self._nbytes, self._free, self._allow = budget, 0, free, allow
        self._lock = threading.RLock()
        self._variants: defaultdict[tuple[str, ...], dict[KVKey, _Variant]] = defaultdict(dict)  # by chunk
        self._uses: defaultdict[tuple[str, str], int] = defaultdict(int)  # by namespace
        self._averages: dict[tuple[str, ...], KVKey] = {}
        self._latest: dict[tuple[str, ...], KVKey] = {}  # of them, by chunk
        self.saved: JsonStore | None = None  # f_r and ``at``; of no chunk: the namespace's uses
        self._changed: dict[str, object] = {}  # to be saved; None: removed

    def __len__(self) -> int:
        return sum(map(len, self._variants.values()))

    def __contains__(self, key: KVKey) -> bool:
        return self._known(key) is not None

    def recall(self, store: KVStore, fingerprint: str, *, variants: bool) -> None:
        """Add what the store holds for a model; ``variants`` too, from their entries' headers."""
        keys = list(store.keys())
        for key in reversed(keys):  # the latest first
            self.add_average(key)
        if self.saved is not None:  # without what other processes or the store's eviction removed
            known = {one.digest() for key in keys for one in (key, KVKey(*_group(key), ""))}
            self._changed.update(dict.fromkeys({*self.saved.keys()} - known))
        for key in keys if variants else ():
            opened = store.open(key, 0.0) if key.fingerprint == fingerprint and is_variant(key) else None
            if opened is None:
                continue
            kv = opened.kv if isinstance(opened, Found) else opened
            has_room = self._nbytes + kv.nbytes <= self._budget
            if has_room:
                self.add(key, kv)
            if not isinstance(opened, Found):
                opened.close()
            if not has_room:
                return

    def add(self, key: KVKey, kv: AnyKV | LayerSource) -> None:
        """Add a stored variant, in place of the least used ones of its namespace if there is no room."""
        impact, freed = Impact.of(key.context, kv.sums, kv.tokens), list[KVKey]()
        with self._lock:
            if key in self:
                return
            while self._nbytes + kv.nbytes > self._budget:
                own = [of for chunk, of in self._variants.items() if chunk[:2] == _group(key)]
                rivals = [other for of in own for other in of]
                if not rivals:
                    break
                freed.append(min(rivals, key=self.weight))
                self.discard(freed[-1])
            uses = self._uses.setdefault(_group(key), self._row(KVKey(*_group(key), "")) or 0)
            weight, at = self._row(key) or (NEW_WEIGHT, uses)
            self._variants[_chunk(key)][key] = _Variant(impact, weight, min(at, uses), kv.nbytes)
            self._note(key, (weight, min(at, uses)))
            self._nbytes += kv.nbytes
        for evicted in freed:
            self._free(evicted)

    def ranked(self, key: KVKey, before: Sequence[str]) -> list[Fit]:
        """The variants of this chunk (under this encoding), the cheapest after ``before`` first."""
        with self._lock:
            own = list(self._variants.get(_chunk(key), {}).items())
        fits = [Fit(other, variant.impact.cost(before)) for other, variant in own]
        return sorted(fits, key=lambda fit: fit.cost)

    def used(self, key: KVKey, before: Sequence[str]) -> None:
        """Count a use after ``before``."""
        with self._lock:
            if (variant := self._known(key)) is not None:
                variant.weight = self.weight(key) + weight_at(variant.impact.cost(before))
                self._uses[_group(key)] += 1
                variant.at = self._uses[_group(key)]
                self._note(key, (variant.weight, variant.at))
                self._note(KVKey(*_group(key), ""), variant.at)

    def save(self) -> None:
        """Save what changed since the last time; a failure is logged."""
        with self._lock:
            changed, self._changed = self._changed, {}
        if self.saved is not None and changed:
            attempt(self.saved.put, changed)

    def weight(self, key: KVKey) -> float:
        """Present f_r; 0 for an unknown variant."""
        with self._lock:
            if (variant := self._known(key)) is None:
                return 0.0
            return variant.weight * math.pow(0.5, (self._uses[_group(key)] - variant.at) / HALF_LIFE)

    def cost(self, key: KVKey, before: Sequence[str]) -> float:
        """CCI (1 - β') of a variant after ``before``; an unknown one counts as KV without sums."""
        if (variant := self._known(key)) is None:
            return NO_IMPACT if before else 0.0
        return variant.impact.cost(before)

    def add_average(self, key: KVKey) -> KVKey | None:
        """Record a stored mean or a prompt's own rows; returns the key that it replaces."""
        if not is_average(key):
            return None
        with self._lock:
            replaced = self._averages.pop(_averaged(key), None)
            self._averages[_averaged(key)] = self._latest[_chunk(key)] = key
            if len(self._averages) > MAX_AVERAGES:  # a store does not report what it evicts
                self.discard(next(iter(self._averages.values())))
        return replaced if replaced != key else None

    def average(self, key: KVKey) -> KVKey | None:
        """The stored entry for the chunk of ``key`` and the system text that its context begins with."""
        if not is_average(key):
            return None
        with self._lock:
            found = self._averages.pop(_averaged(key), None)
            if found is not None:
                self._averages[_averaged(key)] = found
        return found if found is not None and self._allow(found) else None

    def latest(self, key: KVKey) -> KVKey | None:
        """The entry stored last for the chunk of ``key``, after whatever system text."""
        found = self._latest.get(_chunk(key))
        return found if found is not None and self._allow(found) else None

    def discard(self, key: KVKey) -> None:
        """Remove an entry that the store has lost."""
        with self._lock:
            variant = self._variants.get(_chunk(key), {}).pop(key, None)
            if variant is not None:
                self._nbytes -= variant.nbytes
                self._note(key, None)
                if not self._variants[_chunk(key)]:
                    del self._variants[_chunk(key)]
            elif is_average(key):
                for known, name in ((self._averages, _averaged(key)), (self._latest, _chunk(key))):
                    if known.get(name) == key:
                        del known[name]

    def forget(self, namespace: str, chunk_ids: frozenset[str] | None = None) -> None:
        """Drop what ``store.forget`` with the same arguments drops."""
        with self._lock:
            known = [*(key for of in self._variants.values() for key in of), *self._averages.values()]
            for key in known:
                if concerns(key, namespace, chunk_ids):
                    self.discard(key)

    def _row(self, key: KVKey) -> Any:
        return None if self.saved is None else self.saved.get(key.digest())

    def _note(self, key: KVKey, row: object) -> None:
        if self.saved is not None:
            self._changed[key.digest()] = row

    def _known(self, key: KVKey) -> _Variant | None:
        return self._variants.get(_chunk(key), {}).get(key)


def weight_at(cost: float) -> float:
    """What a use adds to f_r where CCI (1 - β') is ``cost`` (Cache-Craft section 3.3)."""
    return 1 / max(cost, MIN_COST)


EXACT_WEIGHT, PLAIN_WEIGHT = weight_at(0.0), weight_at(NO_IMPACT)
"""What a use adds of an exact entry, and of one without recorded impact."""


def is_variant(key: KVKey) -> bool:
    """Whether the key is of an ``in-prompt`` entry."""
    return key.encoding.partition("@")[0] == IN_PROMPT


def is_average(key: KVKey) -> bool:
    """Whether the key is of a mean, or of a prompt's own rows, which may become one."""
    return key.encoding.startswith("average:")


def _group(key: KVKey) -> tuple[str, str]:
    return key.fingerprint, key.namespace


def _chunk(key: KVKey) -> tuple[str, ...]:
    return (*_group(key), key.encoding, key.chunk_id)


def _averaged(key: KVKey) -> tuple[str, ...]:
    return (*_group(key), key.chunk_id, key.context[0])
