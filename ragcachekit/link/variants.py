"""The ``in-prompt`` variants of every chunk: which there are, which fits best, which go (Cache-Craft 3.3)."""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from ragcachekit.link.base import SelectionPolicy, VariantPolicy
from ragcachekit.link.craft_scores import Impact
from ragcachekit.link.lookup import Entry, Fetch
from ragcachekit.link.segments import Wanted
from ragcachekit.model.encoding import InPromptEncoding
from ragcachekit.store.base import KVStore, concerns
from ragcachekit.store.loading import AnyKV
from ragcachekit.types import KVKey

CHUNKS, VARIANTS = 100, 5
HALF_LIFE = 1000
LEAST_COST = 0.05
"""A use counts 1 / cost; below this cost a variant is as good as can be."""

NEWCOMER = 1.0
"""f_r of a variant that was never used: as much as one use at full cost."""

RENEW_ABOVE = 0.25
"""A chunk whose best variant costs more than this gets another one, for the context at hand."""

Space = tuple[str, str]


@dataclass
class _Variant:
    impact: Impact
    worth: float
    at: int


@dataclass(frozen=True)
class Fit:
    """A variant and what it costs at a place: ``CCI (1 - β')``."""

    key: KVKey
    cost: float


class VariantPool:
    """At most N times M variants per model and namespace, shared among its chunks by use.

    A chunk has as many variants as they earn: one popular chunk may hold most of the pool. Every use
    adds ``1 / max(CCI (1 - β'), 0.05)`` to a variant's worth f_r, which halves in ``half_life`` uses of
    its namespace, so that what was popular once does not stay for good. Thread safe.

    Only names are kept here; the KV lives in the store, by whose own rules it goes. A variant that
    leaves the pool is no longer looked for, except where a prompt has exactly its context.

    Parameters
    ----------
    chunks, variants : int
        N and M.
    half_life : int
        In uses.
    """

    def __init__(self, chunks: int = CHUNKS, variants: int = VARIANTS, half_life: int = HALF_LIFE) -> None:
        if min(chunks, variants, half_life) < 1:
            raise ValueError("chunks, variants and half_life must be at least 1")
        self.most = chunks * variants
        self._half_life = half_life
        self._lock = threading.Lock()
        self._known: defaultdict[Space, dict[KVKey, _Variant]] = defaultdict(dict)
        self._of: defaultdict[tuple[str, ...], dict[KVKey, None]] = defaultdict(dict)
        self._uses: defaultdict[Space, int] = defaultdict(int)

    def __len__(self) -> int:
        with self._lock:
            return sum(map(len, self._known.values()))

    def __contains__(self, key: KVKey) -> bool:
        with self._lock:
            return key in self._known.get(_space(key), ())

    def add(self, key: KVKey, kv: AnyKV) -> None:
        """A variant that is in the store; drops the least worthy other one if there are too many."""
        impact, space = Impact.of(key.context, kv.sums, kv.tokens), _space(key)
        with self._lock:
            known = self._known[space]
            if key in known:
                return
            if len(known) >= self.most:
                self._drop(min(known, key=lambda k: self._worth(known[k], space)))
            known[key] = _Variant(impact, NEWCOMER, self._uses[space])
            self._of[_chunk(key)][key] = None

    def ranked(self, key: KVKey, before: Sequence[str]) -> list[Fit]:
        """The variants of this chunk (in prompts of this kind), the cheapest behind ``before`` first."""
        with self._lock:
            known = self._known.get(_space(key), {})
            own = [(other, known[other].impact) for other in self._of.get(_chunk(key), ())]
        fits = [Fit(other, impact.cost(before)) for other, impact in own]
        return sorted(fits, key=lambda fit: fit.cost)

    def paths(self, key: KVKey, length: int) -> list[tuple[str, ...]]:
        """Beginnings of past prompts that end with a chunk and have ``length`` segments."""
        with self._lock:
            known = [k for k in self._known.get(_space(key), ()) if k.encoding == key.encoding]
        return [(*k.context, k.chunk_id) for k in known if len(k.context) == length - 1]

    def used(self, key: KVKey, before: Sequence[str]) -> None:
        """Count a use behind ``before``."""
        space = _space(key)
        with self._lock:
            variant = self._known.get(space, {}).get(key)
            if variant is None:
                return
            worth = self._worth(variant, space)
            self._uses[space] += 1
            variant.worth = worth + 1 / max(variant.impact.cost(before), LEAST_COST)
            variant.at = self._uses[space]

    def worth(self, key: KVKey) -> float:
        """f_r as it stands; 0 for a variant that is not here."""
        with self._lock:
            variant = self._known.get(_space(key), {}).get(key)
            return 0.0 if variant is None else self._worth(variant, _space(key))

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
        self._known.get(_space(key), {}).pop(key, None)
        of = self._of.get(_chunk(key), {})
        of.pop(key, None)
        if not of:
            self._of.pop(_chunk(key), None)

    def _worth(self, variant: _Variant, space: Space) -> float:
        age: float = (self._uses[space] - variant.at) / self._half_life
        return variant.worth * math.pow(0.5, age)


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
        found = fetch.get(key := given.get(number, want.key), len(want.token_ids))
        entry = Entry(key, found) if found is not None else None
        if pool is not None and isinstance(want.encoding, InPromptEncoding):
            entry = _known(entry, pool, want) or _best(want, fetch, pool)
        out.append(entry)
    return out


def _known(entry: Entry | None, pool: VariantPool, want: Wanted) -> Entry | None:
    if entry is not None:
        pool.add(entry.key, entry.found.kv)  # another process, or one before this, may have encoded it
        pool.used(entry.key, want.before)
    return entry


def _best(want: Wanted, fetch: Fetch, pool: VariantPool) -> Entry | None:
    for fit in pool.ranked(want.key, want.before):
        found = fetch.get(fit.key, len(want.token_ids))
        if found is not None:
            pool.used(fit.key, want.before)
            return Entry(fit.key, found, renew=fit.cost > RENEW_ABOVE)
        pool.discard(fit.key)
    return None


def _space(key: KVKey) -> Space:
    return key.fingerprint, key.namespace


def _chunk(key: KVKey) -> tuple[str, ...]:
    return (*_space(key), key.encoding, key.chunk_id)
