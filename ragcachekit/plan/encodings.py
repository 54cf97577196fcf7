"""How the chunks of a prompt are encoded: contexts, keys, and what else is stored for other contexts."""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

from ragcachekit.model.encoding import AverageEncoding, Encoding, InPromptEncoding, NeighbourEncoding
from ragcachekit.model.rope import Rope
from ragcachekit.policies.craft import NO_IMPACT, Impact
from ragcachekit.prompt.segments import TokenSegment
from ragcachekit.store.base import Found, KVStore, LayerSource, concerns
from ragcachekit.store.loader import AnyKV
from ragcachekit.types import ENCODING_PREFIX, Ids, KVKey, chunk_id, whole_id

KNOWN = ("standalone", "sinks:4", "system", "similar:10", "average:3", "in-prompt")
DEFAULT_NEIGHBOURS = {"similar": 10, "average": 3}
"""Neighbours of encoders without a number; of ``similar`` from FusionRAG's top-n analysis."""

IN_PROMPT = "in-prompt"

HALF_LIFE = 1000  # uses in a namespace after which the weight of a variant has halved
MIN_COST = 0.05  # a use counts 1 / cost; lower costs count as this one
SHARE = 0.875  # of a store's bytes for variants: the pool evicts by weight before the store by its policy
NEW_WEIGHT = 1.0  # f_r of an unused variant: that of one use at full cost
MAX_AVERAGES = 1 << 18  # entries in all namespaces together, about 250 MB, those used last


@dataclass(frozen=True)
class Wanted:
    """A cacheable segment of a prompt. The keys below ``before`` are those of the encoder ``average:n``."""

    start: int
    token_ids: Ids
    key: KVKey
    encoding: Encoding
    exact: bool  # at ``start``
    before: tuple[str, ...] = ()  # ids of all preceding segments, texts too, in order
    average: KVKey | None = None  # of the chunk's mean KV after any chunks
    plain: KVKey | None = None  # of its KV after the system text alone
    in_place: KVKey | None = None  # of the rows that this prompt computes if it must
    whole: Wanted | None = None  # of a chunk that is in the prompt in part: all of it, which is encoded
    first: int = 0  # number of its first row that serves here

    @property
    def to_encode(self) -> Wanted:
        """All of the chunk, which serves at any place; of rows that are exact here, just these."""
        if self.whole is None or self.exact or isinstance(self.encoding, InPromptEncoding):
            return self
        return self.whole


class Encodings:
    """Names and keys of encodings under one encoder.

    ``standalone`` is the chunk alone from position 0; ``sinks:n`` after n BOS (EPIC section 5.4); ``system``
    after the text before the first chunk (FusionRAG eq. 5); ``similar:n`` after that text and up to n
    neighbours, the most similar last (eq. 10); ``average:n`` the mean after that text and one, two, ... n
    neighbours; ``in-prompt`` after all that precedes it (Cache-Craft). ``neighbours`` gives those of a chunk,
    most similar first; ``joint`` are the tokens between them and the chunk.

    ValueError for an unknown name or a bad number; for ``similar:n`` and ``average:n`` where frequencies
    depend on the length, which are part of the key.
    """

    def __init__(
        self,
        name: str,
        rope: Rope,
        bos: int | None,
        neighbours: Callable[[Ids], Sequence[Ids]] = lambda _: (),
        joint: Ids = (),
    ) -> None:
        kind, count = _parse(name)
        if kind == "sinks" and bos is None:
            raise ValueError(f"encoder {name!r} needs a BOS token, and this tokenizer has none")
        if kind in DEFAULT_NEIGHBOURS and rope.depends_on_length:
            raise ValueError(
                f"encoder {name!r} places chunks behind others, and this model turns keys by other "
                "frequencies in longer prompts (longrope); use the encoder 'system' with it"
            )
        self.neighbours = count if kind in DEFAULT_NEIGHBOURS else 0
        self.averages = kind == "average"
        self.name = f"{kind}:{count}" if count else kind
        self._before = (bos,) * count if kind == "sinks" and bos is not None else ()
        self._rope, self._near, self._joint = rope, neighbours, joint

    @property
    def needs_system(self) -> bool:
        """Whether chunks are encoded after the prompt's system text."""
        return self.name in ("system", IN_PROMPT) or self.neighbours > 0

    def wanted(self, segments: Sequence[TokenSegment], fingerprint: str, namespace: str) -> Iterator[Wanted]:
        """Every segment whose KV can come from the store, in order."""
        system, start, before, names = self.system_of(segments), 0, list[Ids](), list[str]()
        length = sum(len(segment.token_ids) for segment in segments)
        for segment in segments:
            ids = segment.token_ids
            if not ids:
                continue
            name = segment.name(namespace)
            if segment.is_chunk or (start == 0 and system):
                chunk = (segment.own or ids) if segment.is_chunk else None
                encoding, context = self._encoding(chunk, start, system, before)
                place = _Place(start, length, system, tuple(names), fingerprint, namespace)
                want = self._wanted(ids, name, encoding, context, place)
                if segment.own:
                    whole = self._wanted(segment.own, whole_id(name), encoding, context, place)
                    # Of rows computed after tokens that the prompt does not have, none is exact.
                    whole = replace(whole, exact=whole.exact and not segment.first)
                    want = replace(want, whole=whole, first=segment.first)
                yield want
            before.append(ids)
            names.append(name)
            start += len(ids)

    def encoding(self, ids: Ids, system: Ids = ()) -> tuple[Encoding, tuple[Ids, ...]]:
        """The encoding of a chunk that is not at position 0, and the token ids of its context."""
        return self._encoding(ids, None, system, (system,) if system else ())

    def key(
        self,
        ids: Ids,
        encoding: Encoding,
        context: Sequence[Ids],
        fingerprint: str,
        namespace: str,
        length: int,
    ) -> KVKey:
        """The store key of ``ids`` under ``encoding`` in prompts of ``length`` tokens."""
        names = tuple(chunk_id(one, namespace) for one in context)
        return KVKey(
            fingerprint, namespace, chunk_id(ids, namespace), self._name(encoding.name, length), names
        )

    def _name(self, name: str, length: int) -> str:
        return f"{name}@{self._rope.regime(length)}" if self._rope.depends_on_length else name

    def _wanted(
        self, ids: Ids, name: str, encoding: Encoding, context: tuple[Ids, ...], place: _Place
    ) -> Wanted:
        """A segment with its key; ``name`` is its id."""
        start, length, system, before, fingerprint, namespace = place
        in_prompt = encoding.name == IN_PROMPT  # hashing what precedes again for every chunk would add up
        names = before if in_prompt else tuple(chunk_id(one, namespace) for one in context)
        key = KVKey(fingerprint, namespace, name, self._name(encoding.name, length), names)
        width = len(encoding.before)
        if self._rope.depends_on_length and self._rope.regime(width + len(ids)) != self._rope.regime(length):
            encoding = replace(encoding, length=length)  # the whole prompt's frequencies
        exact = start == 0 or (encoding.name in ("system", IN_PROMPT) and width == start)
        want = Wanted(start, ids, key, encoding, exact, before)
        if not (self.averages and start):
            return want
        # What else may serve, and the name of the prompt's own rows.
        after = before[0] if system else chunk_id(system, namespace)
        want = replace(want, average=replace(key, encoding=self.name, context=(after,)))
        if exact:
            return want
        if isinstance(encoding, AverageEncoding):
            plain = replace(key, encoding=system_encoding(system).name, context=(after,) if system else ())
            want = replace(want, plain=plain)
        # The system text stays first, even if it is empty.
        own = (after, *(before[1:] if system else before))
        return replace(want, in_place=replace(key, encoding=self.name, context=own))

    def _encoding(
        self, chunk: Ids | None, start: int | None, system: Ids, before: Sequence[Ids]
    ) -> tuple[Encoding, tuple[Ids, ...]]:
        """Encoding of a chunk (``start`` None: at no certain place), or of the text at the prompt's start."""
        if chunk is None:
            return Encoding(ENCODING_PREFIX), ()
        if start == 0:
            # Without any context, its exact encoding is standalone, whatever the encoder.
            return Encoding("standalone"), ()
        if self.name == IN_PROMPT and before:
            tokens = tuple(token for ids in before for token in ids)
            return InPromptEncoding(IN_PROMPT, tokens, segments=tuple(map(len, before))), tuple(before)
        is_first = self.averages and start == len(system)
        near = self._fitting(chunk, len(system)) if self.neighbours and not is_first else ()
        if near:
            kind = AverageEncoding if self.averages else NeighbourEncoding
            # An empty system text stays first in the key: else a neighbour would pass for one.
            return kind(self.name, system, 0, near, self._joint), (system, *near)
        if self.needs_system and system:
            return system_encoding(system), (system,)
        return Encoding(self.name if self._before else "standalone", self._before), ()

    def _fitting(self, chunk: Ids, system: int) -> tuple[Ids, ...]:
        """Up to n neighbours that fit into the model's context, the most similar last."""
        others = (ids for ids in dict.fromkeys(self._near(chunk)) if ids and ids != chunk)
        room = self._rope.context - system - len(chunk)
        near: list[Ids] = []
        for ids in islice(others, self.neighbours):
            room -= len(ids) + len(self._joint)
            if room < 0:
                break
            near.append(ids)
        return tuple(near if self.averages else reversed(near))

    @staticmethod
    def system_of(segments: Sequence[TokenSegment]) -> Ids:
        """The text before the first chunk; empty if there is none."""
        filled = [segment for segment in segments if segment.token_ids]
        if not any(segment.is_chunk for segment in filled) or filled[0].is_chunk:
            return ()
        return filled[0].token_ids


class _Place(NamedTuple):
    """What precedes a segment in its prompt of ``length`` tokens."""

    start: int
    length: int
    system: Ids
    before: tuple[str, ...]
    fingerprint: str
    namespace: str


def system_encoding(system: Ids) -> Encoding:
    """The encoding after a system text alone; ``standalone`` without one."""
    return Encoding("system", system) if system else Encoding("standalone")


def _parse(name: str) -> tuple[str, int]:
    """``sinks:4`` to its kind and number, 0 for a kind without one."""
    kind, colon, count = name.partition(":")
    counts = kind in ("sinks", *DEFAULT_NEIGHBOURS)
    known = counts or kind in ("standalone", "system", IN_PROMPT)
    if not known or bool(colon) > counts or (kind == "sinks" and not colon):
        raise ValueError(f"unknown encoder {name!r}; known: {', '.join(KNOWN)}")
    if not colon:
        return kind, DEFAULT_NEIGHBOURS.get(kind, 0)
    if not (count.isascii() and count.isdecimal()) or int(count) < 1:
        raise ValueError(f"encoder {name!r}: {kind}:n needs a number n >= 1")
    return kind, int(count)


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

    Variants (Cache-Craft section 3.3) share ``budget`` bytes by use. Every use adds
    ``1 / max(CCI (1 - β'), 0.05)`` to a variant's weight f_r, which halves in :data:`HALF_LIFE` uses of its
    namespace. ``free`` is called with each variant that is evicted, to delete its KV. The store may evict
    an entry earlier.

    Of ``average:n`` entries the latest is known for each chunk and system text: the companions are chosen
    when it is encoded, and may be others in the next process. ``allow`` returns whether it may serve.
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

    def __len__(self) -> int:
        return sum(map(len, self._variants.values()))

    def __contains__(self, key: KVKey) -> bool:
        return self._known(key) is not None

    def recall(self, store: KVStore, fingerprint: str, *, variants: bool) -> None:
        """Add what the store holds for a model; ``variants`` too, from their entries' headers."""
        keys = list(store.keys())
        for key in reversed(keys):  # the latest first
            self.add_average(key)
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
            self._variants[_chunk(key)][key] = _Variant(
                impact, NEW_WEIGHT, self._uses[_group(key)], kv.nbytes
            )
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
        if not _is_average(key):
            return None
        with self._lock:
            replaced = self._averages.pop(_averaged(key), None)
            self._averages[_averaged(key)] = key
            if len(self._averages) > MAX_AVERAGES:  # a store does not report what it evicts
                del self._averages[next(iter(self._averages))]
        return replaced if replaced != key else None

    def average(self, key: KVKey | None) -> KVKey | None:
        """The stored entry for the chunk of ``key`` and the system text that its context begins with."""
        if key is None or not _is_average(key):
            return None
        with self._lock:
            found = self._averages.pop(_averaged(key), None)
            if found is not None:
                self._averages[_averaged(key)] = found
        return found if found is not None and self._allow(found) else None

    def discard(self, key: KVKey) -> None:
        """Remove an entry that the store has lost."""
        with self._lock:
            variant = self._variants.get(_chunk(key), {}).pop(key, None)
            if variant is not None:
                self._nbytes -= variant.nbytes
                if not self._variants[_chunk(key)]:
                    del self._variants[_chunk(key)]
            elif _is_average(key) and self._averages.get(_averaged(key)) == key:
                del self._averages[_averaged(key)]

    def forget(self, namespace: str, chunk_ids: frozenset[str] | None = None) -> None:
        """Drop what ``store.forget`` with the same arguments drops."""
        with self._lock:
            known = [*(key for of in self._variants.values() for key in of), *self._averages.values()]
            for key in known:
                if concerns(key, namespace, chunk_ids):
                    self.discard(key)

    def _known(self, key: KVKey) -> _Variant | None:
        return self._variants.get(_chunk(key), {}).get(key)


def weight_at(cost: float) -> float:
    """What a use adds to f_r where CCI (1 - β') is ``cost`` (Cache-Craft section 3.3)."""
    return 1 / max(cost, MIN_COST)


def is_variant(key: KVKey) -> bool:
    """Whether the key is of an ``in-prompt`` entry."""
    return key.encoding.partition("@")[0] == IN_PROMPT


def _is_average(key: KVKey) -> bool:
    return key.encoding.startswith("average:")


def _group(key: KVKey) -> tuple[str, str]:
    return key.fingerprint, key.namespace


def _chunk(key: KVKey) -> tuple[str, ...]:
    return (*_group(key), key.encoding, key.chunk_id)


def _averaged(key: KVKey) -> tuple[str, ...]:
    return (*_group(key), key.chunk_id, key.context[0])
