"""How the chunks of a prompt are encoded: contexts and keys; and the look-up of their entries."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from ragcachekit.model.encoding import AverageEncoding, Encoding, InPromptEncoding, NeighbourEncoding
from ragcachekit.model.kv import SENSITIVITY, KVLayout, context_number, contexts_of, has_nan, misfit
from ragcachekit.model.rope import Rope
from ragcachekit.plan.load_planner import LoadPlanner
from ragcachekit.plan.variants import EXACT_WEIGHT, IN_PROMPT, PLAIN_WEIGHT, VariantPool, weight_at
from ragcachekit.prompt.segments import TokenSegment, token_count
from ragcachekit.store.base import KVStore
from ragcachekit.store.loader import AnyKV, Hit, Loader, LoadingKV
from ragcachekit.store.remote import reported
from ragcachekit.types import (
    DEFAULT_ENCODER,
    DEFAULT_NEIGHBOURS,
    ENCODING_PREFIX,
    Ids,
    KVKey,
    chunk_id,
    encoder_name,
    parse_encoder,
    whole_id,
)

log = logging.getLogger(__name__)


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
    retain: float = 0.0  # seconds after its uses in which memory tiers rather evict others

    @property
    def to_encode(self) -> Wanted:
        """All of the chunk, which serves at any place; of rows that are exact here, just these."""
        if self.whole is None or self.exact or isinstance(self.encoding, InPromptEncoding):
            return self
        return self.whole


class Encodings:
    """Names and keys of encodings under one encoder.

    ``sinks:n`` is EPIC section 5.4, ``system`` FusionRAG eq. 5, ``similar:n`` eq. 10, ``in-prompt``
    Cache-Craft. ``neighbours`` gives those of a chunk, most similar first; ``joint`` are the tokens between
    them and the chunk.

    ValueError for an unknown name or a bad number; for ``similar:n`` and ``average:n`` where frequencies
    depend on the length.
    """

    def __init__(
        self,
        name: str,
        rope: Rope,
        bos: int | None,
        neighbours: Callable[[Ids], Sequence[Ids]] = lambda _: (),
        joint: Ids = (),
    ) -> None:
        kind, count = parse_encoder(name)
        if kind == "sinks" and bos is None:
            raise ValueError(f"encoder {name!r} needs a BOS token, and this tokenizer has none")
        if kind in DEFAULT_NEIGHBOURS and rope.depends_on_length:
            raise ValueError(
                f"encoder {name!r} places chunks behind others, and this model turns keys by other "
                "frequencies in longer prompts (longrope); use the encoder 'system' with it"
            )
        self.neighbours = count if kind in DEFAULT_NEIGHBOURS else 0
        self.averages = kind == "average"
        self.name = encoder_name(name)
        self._before = (bos,) * count if kind == "sinks" and bos is not None else ()
        self._rope, self._near, self._joint = rope, neighbours, joint

    @property
    def needs_system(self) -> bool:
        return self.name in ("system", IN_PROMPT) or self.neighbours > 0

    def wanted(self, segments: Sequence[TokenSegment], fingerprint: str, namespace: str) -> Iterator[Wanted]:
        """Every segment whose KV can come from the store, in order."""
        system, start, before, names = self.system_of(segments), 0, list[Ids](), list[str]()
        length = token_count(segments)
        for segment in segments:
            ids = segment.token_ids
            if not ids:
                continue
            name = segment.name(namespace)
            if segment.is_chunk or (start == 0 and system):
                chunk = (segment.own or ids) if segment.is_chunk else None
                encoding, context = self._encoding(chunk, start, system, before)
                if encoding.name == IN_PROMPT:  # hashing what precedes again for every chunk would add up
                    own = tuple(names)
                else:
                    own = tuple(chunk_id(one, namespace) for one in context)
                key = KVKey(fingerprint, namespace, name, self.full_name(encoding.name, length), own)
                want = self._wanted(start, ids, key, encoding, tuple(names), system, length)
                if segment.own:
                    key = replace(key, chunk_id=whole_id(name))
                    whole = self._wanted(start, segment.own, key, encoding, tuple(names), system, length)
                    # Of rows computed after tokens that the prompt does not have, none is exact.
                    whole = replace(whole, exact=whole.exact and not segment.first)
                    want = replace(want, whole=whole, first=segment.first)
                if segment.retain:
                    want = replace(want, retain=segment.retain)
                yield want
            before.append(ids)
            names.append(name)
            start += len(ids)

    def encoding(self, ids: Ids, system: Ids = ()) -> tuple[Encoding, tuple[Ids, ...]]:
        """The encoding of a chunk that is not at position 0, and the token ids of its context."""
        encoding, context = self._encoding(ids, None, system, (system,) if system else ())
        if self.averages and not context:  # one context of a mean, as the text before it is not known
            return AverageEncoding(self.name, joint=self._joint), ((),)
        return encoding, context

    def full_name(self, name: str, length: int) -> str:
        """An encoding's name in keys of prompts of ``length`` tokens."""
        return f"{name}@{self._rope.regime(length)}" if self._rope.depends_on_length else name

    def _wanted(
        self,
        start: int,
        ids: Ids,
        key: KVKey,
        encoding: Encoding,
        before: tuple[str, ...],
        system: Ids,
        length: int,
    ) -> Wanted:
        """A segment with its key, and under ``average:n`` with the keys of what else may serve."""
        width = len(encoding.before)
        if self._rope.depends_on_length and self._rope.regime(width + len(ids)) != self._rope.regime(length):
            encoding = replace(encoding, length=length)  # the whole prompt's frequencies
        exact = start == 0 or (encoding.name in ("system", IN_PROMPT) and width == start)
        want = Wanted(start, ids, key, encoding, exact, before)
        if not (self.averages and start):
            return want
        after = before[0] if system else chunk_id(system, key.namespace)
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
        """Up to n neighbours that fit into a prompt that can be linked, the most similar last."""
        others = (ids for ids in dict.fromkeys(self._near(chunk)) if ids and ids != chunk)
        room = self._rope.exact_up_to - system - len(chunk)
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


def system_encoding(system: Ids) -> Encoding:
    """The encoding after a system text alone; ``standalone`` without one."""
    return Encoding("system", system) if system else Encoding("standalone")


def block_size(encoder: str | None) -> int:
    """How many chunks are encoded after each other: one, and all that the means of ``encoder`` are after."""
    kind, count = parse_encoder(encoder or DEFAULT_ENCODER)
    return 1 + (count if kind == "average" else DEFAULT_NEIGHBOURS["average"])


# -- look-ups ------------------------------------------------------------------------------------------

ENCODED = "encoded"
"""Tier of what was encoded for the one prompt that is planned, as it was missing."""

RENEW_ABOVE = 0.25
"""A chunk whose best variant costs more is encoded again in the present context."""


@dataclass(frozen=True)
class Entry:
    """A stored entry for a wanted chunk; ``renew``: encode the chunk in the present context as well.

    ``contexts``: of how many contexts it is the mean, where this prompt has another one; else None. Of an
    entry of a whole chunk (``want``) whose part is in the prompt, rows from ``first`` on are used.
    """

    key: KVKey
    found: Hit
    renew: bool = False
    contexts: int | None = None
    want: Wanted | None = None
    first: int = 0


class Fetch:
    """Look-ups for one prompt, each done once for all of its plans.

    Without a ``planner`` everything found is used. KV of another ``layout`` is a miss, and deleted from the
    store. ``failures`` says why look-ups failed.
    """

    def __init__(
        self, store: KVStore | Loader, planner: LoadPlanner | None = None, layout: KVLayout | None = None
    ) -> None:
        self._store, self._planner, self._layout = store, planner, layout
        self._known: dict[KVKey, Hit | None] = {}
        self.failures: list[str] = []
        self.given: set[KVKey] = set()

    def get(self, key: KVKey, tokens: int, weight: float = 1.0) -> Hit | None:
        """The entry under ``key``, not loading yet; ``weight`` is its usefulness, for eviction."""
        if key not in self._known:
            self._known[key] = self._look(key, tokens, weight)
        return self._known[key]

    def lose(self, keys: Iterable[KVKey]) -> None:
        """Find these no more: an earlier plan waited for them in vain."""
        self._known.update(dict.fromkeys(keys))

    def give(self, key: KVKey, kv: AnyKV) -> None:
        """Find this under ``key``, whatever the store keeps."""
        self.given.add(key)
        self._known[key] = Hit(kv, ENCODED)

    def drop_nan(self) -> frozenset[KVKey]:
        """Drop the entries that have NaN; returns their keys."""
        lost = {key: hit for key, hit in self._known.items() if hit is not None and has_nan(hit.kv)}
        for key, hit in lost.items():
            self._drop(key, hit, "it has NaN")
        return frozenset(lost)

    def decide(
        self,
        entries: Sequence[Entry | None],
        tokens: Sequence[int],
        recomputed: Callable[[int], int],
        total: int,
        computed: int,
    ) -> tuple[KVKey, ...]:
        """Begin the loads that are quicker than computing; returns the keys of the others.

        ``recomputed(index)`` are rows of an entry that the policy computes again, ``total`` the prompt's,
        ``computed`` those without any entry.
        """
        slow: dict[LoadingKV, list[int]] = {}
        for number, entry in enumerate(entries):
            if entry is not None and isinstance(entry.found.kv, LoadingKV):
                slow.setdefault(entry.found.kv, []).append(number)
        if not slow or not isinstance(self._store, Loader):
            return ()
        chosen = [True] * len(slow)
        if self._planner is not None:
            again = [0 if entry is None else recomputed(i) for i, entry in enumerate(entries)]
            spared = [sum(tokens[i] - again[i] for i in at) for at in slow.values()]
            chosen = self._planner.choose(list(slow), spared, total, computed + sum(again))
        skipped = [kv for kv, load in zip(slow, chosen, strict=True) if not load]
        self._store.begin(kv for kv in slow if kv not in skipped)
        self._store.release(skipped)
        for kv in skipped:
            self._known.pop(kv.key, None)  # released: a later plan opens it again
        return tuple(kv.key for kv in skipped)

    def _look(self, key: KVKey, tokens: int, weight: float) -> Hit | None:
        with reported(self.failures):
            if isinstance(self._store, Loader):
                hit = self._store.open(key, weight)
            else:
                found = self._store.get(key, weight)
                hit = Hit(found.kv, found.tier) if found is not None else None
        reason = misfit(key, hit.kv, tokens, self._layout) if hit is not None else None
        if hit is None or reason is None:
            return hit
        self._drop(key, hit, reason)
        return None

    def _drop(self, key: KVKey, hit: Hit, reason: str) -> None:
        log.warning("tier %s had an entry that is not used and leaves the store: %s", hit.tier, reason)
        self.failures.append(f"{hit.tier}: an entry was dropped: {reason}")
        self._store.discard(key)


def find_entry(want: Wanted, fetch: Fetch, pool: VariantPool) -> Entry | None:
    """The entry of exactly a wanted chunk's context, else the best one of another, or None."""
    entry = _find(want, fetch, pool)
    if want.whole is not None and (entry is None or entry.renew):  # it is in the prompt in part
        whole = _find(want.whole, fetch, pool)
        if whole is not None and (entry is None or not whole.renew):
            return replace(whole, want=want.whole, first=want.first)
    return entry


def keys_for(want: Wanted, pool: VariantPool) -> list[KVKey]:
    """Keys under which :func:`find_entry` may find an entry for a wanted chunk, in its order."""
    whole = keys_for(want.whole, pool) if want.whole is not None else []
    if isinstance(want.encoding, InPromptEncoding):
        return [want.key, *(fit.key for fit in pool.ranked(want.key, want.before)), *whole]
    mean = None if want.average is None else pool.average(want.average) or pool.latest(want.average)
    return [key for key in (want.key, mean, want.plain) if key is not None] + whole


def _find(want: Wanted, fetch: Fetch, pool: VariantPool) -> Entry | None:
    tokens, in_prompt = len(want.token_ids), isinstance(want.encoding, InPromptEncoding)
    weight = EXACT_WEIGHT if want.exact else PLAIN_WEIGHT
    if in_prompt and not want.exact:
        weight = weight_at(pool.cost(want.key, want.before))
    found = fetch.get(want.key, tokens, weight)
    entry = Entry(want.key, found) if found is not None else None
    if in_prompt:
        if entry is None:
            return _variant(want, fetch, pool)
        pool.add(entry.key, entry.found.kv)  # an earlier or other process may have encoded it
        pool.used(entry.key, want.before)
        return entry
    to_average = isinstance(want.encoding, AverageEncoding)
    if entry is not None and (to_average or not want.in_place):
        return entry
    # A chunk whose companions are not known is named as after the system text alone.
    if want.average is not None and (mean := pool.average(want.average)) is not None:
        if (found := fetch.get(mean, tokens)) is not None:
            if want.exact:  # computed here it is exact from then on
                return Entry(mean, found, contexts=0)
            if want.in_place is None:
                return Entry(mean, found, renew=to_average and SENSITIVITY not in found.kv.sums)
            known = contexts_of(found.kv)
            is_new = bool(known) and context_number(want.in_place.digest()) not in known
            return Entry(mean, found, contexts=len(known) if is_new else None)
        pool.discard(mean)
    if entry is not None:
        return replace(entry, contexts=0)
    own = want.exact or want.in_place is not None
    for key in (want.plain, None if want.average is None else pool.latest(want.average)):
        if key is not None and (found := fetch.get(key, tokens)) is not None:
            return Entry(key, found, renew=not own, contexts=0 if own else None)
        if key is not None:
            pool.discard(key)  # the store has lost it
    return None


def _variant(want: Wanted, fetch: Fetch, pool: VariantPool) -> Entry | None:
    for fit in pool.ranked(want.key, want.before):
        found = fetch.get(fit.key, len(want.token_ids), weight_at(fit.cost))
        if found is not None:
            pool.used(fit.key, want.before)
            return Entry(fit.key, found, renew=fit.cost > RENEW_ABOVE)
        pool.discard(fit.key)
    return None
