"""Decide, for one prompt, which rows are kept, which are recomputed and which were never cached."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

from ragcachekit.link.base import ExactPolicy, GuidedPolicy, LayerwisePolicy, PlacedChunk, SelectionPolicy
from ragcachekit.link.beginning import TURN, Beginning, BeginningReader
from ragcachekit.link.decided import decided
from ragcachekit.link.encodings import Encodings
from ragcachekit.link.lookup import MEMORY_TIERS, Decision, Entry, Fetch
from ragcachekit.link.planned import COMPUTED, LinkPlan, Missing, Piece, plain_plan
from ragcachekit.link.segments import TokenSegment, Wanted
from ragcachekit.link.uses import Use, guide_of, use_of
from ragcachekit.link.variants import VariantPool, look_up
from ragcachekit.reports import ChunkUse, LinkReport
from ragcachekit.store.base import KVStore
from ragcachekit.types import ENCODING_PREFIX, KVKey


def make_plan(
    segments: Sequence[TokenSegment],
    policy: SelectionPolicy,
    encodings: Encodings,
    store: KVStore | Fetch,
    fingerprint: str,
    namespace: str,
    variants: VariantPool | None = None,
    tree: BeginningReader | None = None,
) -> LinkPlan:
    """Look every cacheable segment up and let the policy choose among the cached rows.

    ``store`` as a :class:`~ragcachekit.link.lookup.Fetch` begins to load what lies in slow tiers, where
    that is quicker than computing it. ``variants`` are what chunks of the encoder ``in-prompt`` may use
    in other contexts than their own. What ``tree`` knows of the prompt's beginning is exact; only what
    stands behind it is looked up chunk by chunk (FusionRAG section 4.1, alternative path).
    """
    if not policy.reads_cache:
        return plain_plan(segments, policy.name, encodings.name, namespace)
    wanted = tuple(encodings.wanted(segments, fingerprint, namespace))
    fetch = store if isinstance(store, Fetch) else Fetch(store)
    beginning = None
    if tree is not None:
        layerwise = isinstance(policy, LayerwisePolicy)
        beginning = tree.read(segments, wanted, fingerprint, namespace, layerwise=layerwise)
        wanted = tuple(want for want in wanted if want.start >= beginning.tokens)
    lookup = _Lookup(tuple(segments), policy, encodings.name, namespace, wanted, variants, fetch, beginning)
    return _plan(lookup)


@dataclass(frozen=True, eq=False)
class _Lookup:
    """All that a plan is made from, so that it can be made again."""

    segments: tuple[TokenSegment, ...]
    policy: SelectionPolicy
    encoder: str
    namespace: str
    wanted: tuple[Wanted, ...]
    variants: VariantPool | None
    fetch: Fetch
    beginning: Beginning | None = None

    def serves(self, want: Wanted) -> bool:
        """Whether an entry of the chunk store can be of use to the policy.

        Not to one that keeps exact rows alone where it would not be exact; and with a tree, not where its
        keys were turned back and forth: computed in place it goes into the tree, with all behind it.
        """
        if not self._exact_only:
            return True
        return want.exact and (self.beginning is None or want.encoding.name == ENCODING_PREFIX)

    @cached_property
    def _exact_only(self) -> bool:
        # Asked once per chunk, and asking a protocol takes longer than a look-up.
        return isinstance(self.policy, ExactPolicy)

    def again(self, lost: frozenset[KVKey]) -> LinkPlan:
        """The plan if these entries were not there."""
        return _plan(replace(self, fetch=self.fetch.without(lost)))


def _plan(lookup: _Lookup) -> LinkPlan:
    begun = time.perf_counter()
    policy, wanted = lookup.policy, lookup.wanted
    ids = tuple(chain.from_iterable(segment.token_ids for segment in lookup.segments))
    entries = look_up(wanted, policy, lookup.fetch, lookup.variants)
    if lookup.beginning is not None:
        entries = [e if lookup.serves(want) else None for want, e in zip(wanted, entries, strict=True)]
    decision = _decision(lookup, entries, len(ids))
    parts = _parts(wanted, decision, lookup.beginning)
    report = _report(lookup, parts, len(ids), (time.perf_counter() - begun) * 1e3)
    serving = {want.key for want in wanted if lookup.serves(want)}
    missing = tuple(item for item in parts.missing.values() if item.key in serving)
    plan = LinkPlan(ids, tuple(parts.pieces), (), missing, report, tuple(parts.placed))
    return replace(
        _chosen(plan, policy, lookup.segments),
        again=lookup.again,
        skipped=decision.skipped,
        resident=decision.resident,
        beginning=lookup.beginning,
    )


def _decision(lookup: _Lookup, entries: Sequence[Entry | None], total: int) -> Decision:
    """What to load, and what to compute although it is there."""
    policy, wanted, beginning = lookup.policy, lookup.wanted, lookup.beginning
    found = sum(len(w.token_ids) for w, entry in zip(wanted, entries, strict=True) if entry is not None)
    new = total - found - (beginning.tokens if beginning is not None else 0)

    def use(number: int) -> Use:
        entry = entries[number]
        assert entry is not None, "only what was found is used"
        return use_of(policy, _placed(wanted[number], entry), entry.found.kv.layers)

    guide = guide_of(policy, new, beginning.placed if beginning is not None else ())
    return lookup.fetch.decide(entries, use, total, new, guide)


@dataclass
class _Parts:
    """What became of the segments that were looked up, in order."""

    placed: list[PlacedChunk]
    pieces: list[Piece]
    missing: dict[KVKey, Missing]
    uses: list[ChunkUse]


def _parts(wanted: Sequence[Wanted], decision: Decision, beginning: Beginning | None) -> _Parts:
    """Place what was found. What is in the store and was skipped is not missing there."""
    out = _Parts([], [], {}, [])
    if beginning is not None:
        out.placed += beginning.placed
        out.uses += beginning.uses
        out.pieces += [Piece(kv.start or 0, kv) for kv in beginning.kvs]
    for want, entry in zip(wanted, decision.entries, strict=True):
        if (entry is None and want.key not in decision.skipped) or (entry is not None and entry.renew):
            out.missing[want.key] = Missing(want.key, want.token_ids, want.encoding)
        if entry is None:
            out.uses.append(ChunkUse(want.key.chunk_id, len(want.token_ids), COMPUTED))
            continue
        chunk = _placed(want, entry)
        out.placed.append(chunk)
        out.pieces.append(Piece(want.start, entry.found.kv))
        out.uses.append(ChunkUse(chunk.chunk_id, chunk.tokens, entry.found.tier, exact=chunk.exempt))
    return out


def _placed(want: Wanted, entry: Entry) -> PlacedChunk:
    kv = entry.found.kv
    return PlacedChunk(
        want.key.chunk_id,
        want.start,
        len(want.token_ids),
        want.exact and entry.key == want.key and not kv.quantised,
        attended=kv.sums.get("attended"),
        before=want.before,
        behind=entry.key.context,
        sums=kv.sums,
    )


def _report(lookup: _Lookup, parts: _Parts, tokens: int, load_ms: float) -> LinkReport:
    """The report of a plan that nobody has decided; whoever loaded from a slow tier waited to open it."""
    sources = [use.source for use in parts.uses if use.source != COMPUTED]
    slow = {
        id(piece.kv): piece.kv.nbytes
        for piece, source in zip(parts.pieces, sources, strict=True)
        if source.removeprefix("tree:") not in (*MEMORY_TIERS, TURN)
    }
    known = lookup.beginning
    prefix = parts.uses[:1] if _begins_with_prefix(lookup.segments, parts.uses) else []
    load_ms += known.ms if known is not None else 0.0
    return LinkReport(
        lookup.policy.name,
        lookup.encoder,
        lookup.namespace,
        prompt_tokens=tokens,
        chunks=tuple(parts.uses[len(prefix) :]),
        prefix=prefix[0] if prefix else None,
        load_ms=load_ms,
        wait_ms=load_ms if slow else 0.0,
        loaded_bytes=sum(slow.values()),
        tree_tokens=known.match.tokens if known is not None else 0,
    )


def _begins_with_prefix(segments: Sequence[TokenSegment], uses: Sequence[ChunkUse]) -> bool:
    """Whether the first use is the text before the first chunk, and not a chunk or a past turn."""
    first = next((segment for segment in segments if segment.token_ids), None)
    return first is not None and not first.is_chunk and bool(uses) and uses[0].source != TURN


def _chosen(plan: LinkPlan, policy: SelectionPolicy, segments: Sequence[TokenSegment]) -> LinkPlan:
    """Decided by the policy, or open where it needs the model's help for that."""
    length = len(plan.token_ids)
    # The turn before this one may hold the beginning of the question: those rows do not run again.
    begin = max([_end_of_chunks(segments), *(piece.stop for piece in plan.pieces)])
    question = tuple(range(begin, length)) or (length - 1,)
    if isinstance(policy, GuidedPolicy) and any(not chunk.exempt for chunk in plan.placed):
        return replace(decided(plan, ()), policy=policy, question=question)
    chosen = policy.select(plan.placed)
    if not (isinstance(policy, LayerwisePolicy) and chosen):
        return decided(plan, chosen)
    return replace(decided(plan, chosen), policy=policy, question=question)


def _end_of_chunks(segments: Sequence[TokenSegment]) -> int:
    at = end = 0
    for segment in segments:
        at += len(segment.token_ids)
        end = at if segment.is_chunk else end
    return end
