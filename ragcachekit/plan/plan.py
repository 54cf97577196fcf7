"""Planning of one prompt: which rows are kept, recomputed, or computed because they are not cached."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from ragcachekit.model.encoding import InPromptEncoding
from ragcachekit.model.kv import PER_TOKEN
from ragcachekit.plan.apply_selection import apply_selection
from ragcachekit.plan.encodings import Wanted
from ragcachekit.plan.link_plan import COMPUTED, LinkPlan, Missing, Piece, miss_reason, plain_plan
from ragcachekit.plan.load_planner import MEMORY_TIERS, RowCost, row_cost_of
from ragcachekit.plan.lookup import Decision, Entry, Fetch, find_entries
from ragcachekit.plan.prefix_match import TURN
from ragcachekit.plan.request import PromptRequest
from ragcachekit.plan.variants import VariantPool
from ragcachekit.policies.base import ExactPolicy, GuidedPolicy, LayerwisePolicy, PlacedChunk
from ragcachekit.prompt.segments import TokenSegment
from ragcachekit.reports import ChunkUse, LinkReport
from ragcachekit.types import ENCODING_PREFIX, Ids, KVKey, whole_id


def make_plan(request: PromptRequest, variants: VariantPool, without: Collection[KVKey] = ()) -> LinkPlan:
    """Look up every cacheable segment, decide what to load, and let the policy select among cached rows.

    ``variants`` are ``in-prompt`` entries to use in other contexts. Entries in ``without`` count as not
    found, as an earlier plan waited for them in vain.
    """
    if not request.reads_cache:
        return plain_plan(request)
    started_at = time.perf_counter()
    lost = frozenset(without)
    fetch, ids = request.fetch.without(lost), request.token_ids
    serving = _serving(request)
    entries = find_entries(request.wanted, fetch, variants)
    if request.prefix_match is not None:
        entries = [entry if serves else None for entry, serves in zip(entries, serving, strict=True)]
    decision = _decision(request, fetch, entries, len(ids))
    parts = _parts(request, decision, entries, ids)
    report = _report(request, parts, len(ids), (time.perf_counter() - started_at) * 1e3)
    useful = {want.key for want, serves in zip(request.wanted, serving, strict=True) if serves}
    useful |= {
        key
        for want in request.wanted
        if want.key in useful
        for key in (want.in_place, want.whole and want.whole.key)
        if key
    }
    plan = LinkPlan(
        ids,
        tuple(parts.pieces),
        (),
        tuple(item for item in parts.missing.values() if item.key in useful),
        report,
        tuple(parts.placed),
        cold=tuple(parts.cold),
        request=request,
        without=lost,
        skipped=decision.skipped,
    )
    return _selected(plan, request)


def _serving(request: PromptRequest) -> list[bool]:
    """Per wanted segment, whether the policy can use an entry of the chunk store.

    A policy that keeps only exact rows needs exact entries; with a tree, only the prompt's first text: chunks
    computed in place go into the tree unrotated, with all that follows.
    """
    if not isinstance(request.policy, ExactPolicy):
        return [True] * len(request.wanted)
    no_tree = request.prefix_match is None
    return [want.exact and (no_tree or want.encoding.name == ENCODING_PREFIX) for want in request.wanted]


def _decision(request: PromptRequest, fetch: Fetch, entries: Sequence[Entry | None], total: int) -> Decision:
    wanted, match = request.wanted, request.prefix_match
    found = sum(len(want.token_ids) for want, entry in zip(wanted, entries, strict=True) if entry)
    new = total - found - (match.tokens if match is not None else 0)

    def use(number: int) -> RowCost:
        entry = entries[number]
        assert entry is not None, "only what was found is used"
        return row_cost_of(request.policy, _placed(wanted[number], entry), entry.found.kv.layers)

    return fetch.decide(entries, use, total, new)


@dataclass
class _Parts:
    placed: list[PlacedChunk]
    pieces: list[Piece]
    missing: dict[KVKey, Missing]
    uses: list[ChunkUse]
    cold: list[PlacedChunk]
    sources: list[str]  # tiers of the pieces


def _parts(request: PromptRequest, decision: Decision, found: Sequence[Entry | None], ids: Ids) -> _Parts:
    """The looked-up segments in order; what was ``found`` and skipped is not missing."""
    lengths = tuple(len(segment.token_ids) for segment in request.segments if segment.token_ids)
    out, match = _Parts([], [], {}, [], [], []), request.prefix_match
    if match is not None:
        out.placed += match.placed
        out.uses += match.uses
        out.pieces += [Piece(kv.start or 0, kv) for kv in match.kvs]
        out.sources += match.sources
    for want, entry, stored in zip(request.wanted, decision.entries, found, strict=True):
        if stored is None or (entry is not None and entry.renew):
            item = want.to_encode
            key, encoding = item.key, item.encoding
            if want.in_place and not entry:  # made here: of all chunks it would take memory for nothing
                item, key, segments = want, want.in_place, lengths[: len(want.before)]
                encoding = InPromptEncoding(key.encoding, ids[: want.start], segments=segments)
            out.missing[key] = Missing(key, item.token_ids, encoding, request.epoch)
        if entry is None:
            chunk = PlacedChunk(want.key.chunk_id, want.start, len(want.token_ids), False)
            out.cold.append(chunk)
            out.uses.append(ChunkUse(whole_id(chunk.chunk_id), chunk.tokens, COMPUTED))
            continue
        chunk, keep = _placed(want, entry), None if entry.want is None else len(want.token_ids)
        out.placed.append(chunk)
        out.pieces.append(Piece(want.start, entry.found.kv, keep, entry.first))
        use = ChunkUse(whole_id(chunk.chunk_id), chunk.tokens, entry.found.tier, exact=chunk.is_exact)
        out.uses.append(use)
        out.sources.append(entry.found.tier)
    return out


def _placed(want: Wanted, entry: Entry) -> PlacedChunk:
    kv, served, sums = entry.found.kv, want, entry.found.kv.sums
    if entry.want is not None:
        served, rows = entry.want, slice(entry.first, entry.first + len(want.token_ids))
        sums = {name: t[..., rows] if name in PER_TOKEN else t for name, t in sums.items()}
    return PlacedChunk(
        want.key.chunk_id,
        want.start,
        len(want.token_ids),
        served.exact and entry.key == served.key and not kv.quantised,
        attended=sums.get("attended"),
        before=want.before,
        context=entry.key.context,
        sums=sums,
    )


def _report(request: PromptRequest, parts: _Parts, tokens: int, load_ms: float) -> LinkReport:
    """The report before any selection; opening entries of a slow tier counts as waiting."""
    slow = {
        id(piece.kv): piece.kv.nbytes
        for piece, source in zip(parts.pieces, parts.sources, strict=True)
        if source.removeprefix("tree:") not in (*MEMORY_TIERS, TURN)
    }
    known = request.prefix_match
    prefix = parts.uses[:1] if _begins_with_prefix(request.segments, parts.uses) else []
    load_ms += known.ms if known is not None else 0.0
    return LinkReport(
        request.label or request.policy.name,
        request.encoder,
        request.namespace,
        prompt_tokens=tokens,
        chunks=tuple(parts.uses[len(prefix) :]),
        prefix=prefix[0] if prefix else None,
        load_ms=load_ms,
        wait_ms=request.waited_ms + (load_ms if slow else 0.0),
        loaded_bytes=sum(slow.values()),
        tree_tokens=known.match.tokens if known is not None else 0,
        notes=request.notes,
        miss_reason=miss_reason(request),
    )


def _begins_with_prefix(segments: Sequence[TokenSegment], uses: Sequence[ChunkUse]) -> bool:
    """Whether the first use is the text before the first chunk, and not a chunk or a past turn."""
    first = next((segment for segment in segments if segment.token_ids), None)
    return first is not None and not first.is_chunk and bool(uses) and uses[0].source != TURN


def _selected(plan: LinkPlan, request: PromptRequest) -> LinkPlan:
    """The plan with its rows, and with the policy if that selects during the forward."""
    length, policy = len(plan.token_ids), request.policy
    # A past turn may hold the start of the question: those rows do not run again.
    begin = max([_end_of_chunks(request.segments), *(piece.stop for piece in plan.pieces)])
    question = tuple(range(begin, length)) or (length - 1,)
    if isinstance(policy, GuidedPolicy) and any(not chunk.is_exact for chunk in plan.placed):
        return replace(apply_selection(plan, ()), policy=policy, question=question)
    chosen = policy.select(plan.placed)
    if not (isinstance(policy, LayerwisePolicy) and chosen):
        return apply_selection(plan, chosen)
    return replace(apply_selection(plan, chosen), policy=policy, question=question)


def _end_of_chunks(segments: Sequence[TokenSegment]) -> int:
    at = end = 0
    for segment in segments:
        at += len(segment.token_ids)
        end = at if segment.is_chunk else end
    return end
