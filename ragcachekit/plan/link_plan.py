"""A prompt's request and its plan: cached pieces, the rows to compute and what was missing."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch

from ragcachekit.model.encoding import Encoding, InPromptEncoding
from ragcachekit.model.kv import PER_TOKEN, ChunkKV, contexts_of
from ragcachekit.plan.encodings import ENCODED, Entry, Fetch, Wanted, find_entry
from ragcachekit.plan.load_planner import MEMORY_TIERS, recomputed_rows
from ragcachekit.plan.prefix_match import TURN, PrefixMatch
from ragcachekit.plan.variants import VariantPool
from ragcachekit.policies.base import GuidedPolicy, LayerwisePolicy, PlacedChunk, SelectionPolicy
from ragcachekit.prefix_tree.nodes import BLOCK, Root, Step
from ragcachekit.prompt.segments import TokenSegment
from ragcachekit.reports import ChunkUse, LinkReport
from ragcachekit.store.base import NullStore
from ragcachekit.store.loader import AnyKV, LoadingKV
from ragcachekit.types import ENCODING_PREFIX, Ids, KVKey, whole_id

log = logging.getLogger(__name__)

COMPUTED = "computed"
"""Source of chunks that are not cached."""

CONTEXTS_TO_OBSERVE = 2
"""Rows of a chunk are computed in a further prompt, after its answer, while its mean is of fewer contexts."""

RECOMPUTED = "the policy recomputed all that was cached"


@dataclass(frozen=True, eq=False)
class PromptRequest:
    """A segmented prompt with all that its plans need."""

    segments: tuple[TokenSegment, ...]
    policy: SelectionPolicy
    encoder: str
    namespace: str
    wanted: tuple[Wanted, ...] = ()  # cacheable segments after the prefix match
    prefix_match: PrefixMatch | None = None  # with the knowledge tree, if there is one
    fetch: Fetch = field(default_factory=lambda: Fetch(NullStore()))
    place: tuple[Root, tuple[Step, ...]] | None = None  # in the tree
    label: str = ""  # name of the policy in the report, if not its own (budget:0.05 -> lego:4)
    notes: tuple[str, ...] = ()  # for the report
    fallback: str | None = None  # reason for a prefill in full
    epoch: int = 0  # number of forgets when the prompt came
    observes: frozenset[KVKey] = frozenset()  # entries that it computes, although others serve meanwhile
    settles: bool = False  # the system text changes with the prompts: what is stored after others is enough
    waited_ms: float = 0.0  # by earlier plans, in vain
    retries: int = 0  # earlier plans that could not be run
    texts: Mapping[Ids, str] = field(default_factory=dict)  # of its chunks, by their ids
    kept_rows: int | None = None  # KV of rows from here on is not kept for later prompts; None: all is

    def with_note(self, note: str) -> PromptRequest:
        return replace(self, notes=(*self.notes, note))

    def after_failure(self, error: Exception) -> PromptRequest:
        """The request to compute in full, once its linked prompt has failed."""
        log.warning("a linked prompt failed and is computed in full", exc_info=error)
        return replace(self, fallback=f"the linked prompt failed: {error!r}", retries=self.retries + 1)

    @property
    def token_ids(self) -> Ids:
        return tuple(chain.from_iterable(segment.token_ids for segment in self.segments))

    @property
    def reads_cache(self) -> bool:
        return self.fallback is None and self.policy.reads_cache

    def may_keep(self, stop: int) -> bool:
        """Whether KV of rows up to ``stop`` may be kept for later prompts."""
        return self.kept_rows is None or stop <= self.kept_rows

    def may_reuse(self, want: Wanted) -> bool:
        """Whether the policy may use an entry of the chunk store for a segment.

        A policy that keeps only exact rows needs exact entries; with a tree, only the prompt's first text:
        chunks computed in place go into the tree unrotated, with all that follows.
        """
        if not self.reads_cache or not getattr(self.policy, "exact_only", False):
            return self.reads_cache
        return want.exact and (self.place is None or want.encoding.name == ENCODING_PREFIX)


@dataclass(frozen=True)
class Missing:
    """A missing entry: what to encode, and under which key to store it.

    ``epoch`` is the number of forgets when its request began (:class:`ForgetEpochs`); after a later one that
    concerns its key it is not stored. Once stored it is retained for ``retain`` seconds after each use.
    """

    key: KVKey
    token_ids: tuple[int, ...]
    encoding: Encoding
    epoch: int = 0
    retain: float = 0.0

    @property
    def content(self) -> Ids:
        """Token ids of all that the KV is computed from: the context, then the chunk."""
        near, joint = getattr(self.encoding, "neighbours", ()), getattr(self.encoding, "joint", ())
        between = (token for ids in near for token in (*ids, *joint))
        return (*self.encoding.before, *between, *self.token_ids)


@dataclass(frozen=True, eq=False)
class Piece:
    """Cached KV of a part of the prompt: at ``start``, ``keep`` (all) rows of ``kv`` from ``first`` on."""

    start: int
    kv: AnyKV
    keep: int | None = None
    first: int = 0

    @property
    def tokens(self) -> int:
        return self.kv.tokens - self.first if self.keep is None else self.keep

    @property
    def rows(self) -> slice:
        return slice(self.first, self.first + self.tokens)

    @property
    def stop(self) -> int:
        return self.start + self.tokens


@dataclass(frozen=True, eq=False, repr=False)
class LinkPlan:
    """The complete plan of one prompt."""

    token_ids: tuple[int, ...]  # the whole prompt
    pieces: tuple[Piece, ...]  # in order, not overlapping
    rows: tuple[int, ...]  # ascending positions to compute: recomputed, missing, new, and always the last
    missing: tuple[Missing, ...]
    report: LinkReport  # with a policy: as if that selected nothing more
    placed: tuple[PlacedChunk, ...] = ()  # the cached chunks of the pieces
    policy: SelectionPolicy | None = None  # selects during the forward; None once everything is selected
    question: tuple[int, ...] = ()  # with a policy: positions that are computed after the last chunk
    request: PromptRequest | None = None  # None for a plan made by hand, which cannot be planned again
    without: frozenset[KVKey] = frozenset()  # entries that counted as not found
    skipped: tuple[KVKey, ...] = ()  # found, but quicker to compute than to load
    cold: tuple[PlacedChunk, ...] = ()  # chunks that are computed: missing or skipped
    observable: tuple[Missing, ...] = ()  # further contexts of found means, to be computed after the answer

    def __repr__(self) -> str:
        return f"LinkPlan({self.report})"

    @property
    def chunks(self) -> tuple[PlacedChunk, ...]:
        return tuple(sorted((*self.placed, *self.cold), key=lambda chunk: chunk.start))

    @property
    def prefix_match(self) -> PrefixMatch | None:
        """The prompt's match in the knowledge tree; None without a tree."""
        return None if self.request is None else self.request.prefix_match

    @property
    def loads(self) -> tuple[LoadingKV, ...]:
        """Entries among its pieces that are loaded during the forward."""
        return tuple(piece.kv for piece in self.pieces if isinstance(piece.kv, LoadingKV))

    @property
    def kept(self) -> int:
        return len(self.token_ids) - len(self.rows)

    def with_note(self, note: str) -> LinkPlan:
        return replace(self, report=replace(self.report, notes=(*self.report.notes, note)))

    def without_kv(self) -> LinkPlan:
        """The plan once it has run: no tensors, so that its entries can be evicted, but all else."""

        def place(piece: Piece) -> Piece:
            nothing = (torch.empty(1, piece.kv.tokens, 1, device="meta"),)
            return replace(piece, kv=ChunkKV(nothing, nothing, piece.kv.start, {}, piece.kv.quantised))

        return replace(
            self,
            pieces=tuple(map(place, self.pieces)),
            placed=tuple(replace(chunk, sums={}) for chunk in self.placed),
            request=self.request and replace(self.request, fetch=Fetch(NullStore())),
        )

    def without_last(self) -> LinkPlan:
        """The plan for the prompt without its last token, for a forward ahead of ``generate``."""
        last = len(self.token_ids) - 1
        pieces = tuple(
            piece if piece.stop <= last else replace(piece, keep=last - piece.start)
            for piece in self.pieces
            if piece.start < last
        )
        return replace(self, token_ids=self.token_ids[:-1], rows=self.rows[:-1], pieces=pieces)


def apply_selection(
    plan: LinkPlan, chosen: Iterable[int], per_layer: Sequence[int] | None = None, layers: int = 1
) -> LinkPlan:
    """The plan with these cached positions recomputed, and its report.

    ``per_layer`` is the number of cached rows that each of the ``layers`` layers recomputed, if it differs
    from the number chosen. ValueError for positions outside the cached chunks.
    """
    # One flag per token: sets of tens of thousands of positions take longer than a GPU's whole forward.
    length, placed = len(plan.token_ids), plan.placed
    cached, exact = _spread(placed, length), _spread([c for c in placed if c.is_exact], length)
    picked = np.zeros(length, dtype=bool)
    positions = np.fromiter(chosen, dtype=np.int64)
    outside = positions.size and not (positions.min() >= 0 and positions.max() < length)
    if not outside:
        picked[positions] = True
    if outside or (picked & ~cached).any():
        raise ValueError(f"policy {plan.report.policy} chose positions outside the cached chunks")
    # The last row gives the next token's logits: it is always computed.
    picked[-1:] = cached[-1:]
    kept, total, recomputed = cached & ~picked, int(cached.sum()), int(picked.sum())
    spent = sum(per_layer) / layers if per_layer is not None else recomputed
    remaining, prefix = iter(placed), plan.report.prefix

    def counted(use: ChunkUse) -> ChunkUse:
        if use.source == COMPUTED:
            return use
        again = sum(picked[chunk.start : chunk.stop].sum() for chunk in chunks_of(use, remaining))
        return replace(use, recomputed=int(again))

    report = replace(
        plan.report,
        exact_tokens=int((kept & exact).sum()),
        approximate_tokens=int((kept & ~exact).sum()),
        recomputed_tokens=recomputed,
        computed_tokens=length - total,
        recompute_ratio=spent / total if total else 0.0,
        miss_reason="" if kept.any() else RECOMPUTED if placed else plan.report.miss_reason,
        prefix=None if prefix is None else counted(prefix),
        chunks=tuple(map(counted, plan.report.chunks)),
    )
    return replace(plan, rows=tuple(np.flatnonzero(~kept).tolist()), report=report, policy=None)


def _spread(chunks: Iterable[PlacedChunk], length: int) -> npt.NDArray[np.bool_]:
    out = np.zeros(length, dtype=bool)
    for chunk in chunks:
        out[chunk.start : chunk.stop] = True
    return out


def chunks_of(use: ChunkUse, placed: Iterator[PlacedChunk]) -> Iterator[PlacedChunk]:
    """The next chunks of a plan, which one use of its report is about: the tree has text in blocks."""
    left = use.tokens
    while left > 0:
        chunk = next(placed)
        left -= chunk.tokens
        yield chunk


def miss_reason(request: PromptRequest) -> str:
    """Why a request reuses nothing, if it does."""
    if request.fallback is not None:
        return request.fallback
    if not request.policy.reads_cache:
        return f"policy {request.policy.name} computes everything"
    known = request.prefix_match
    if known is not None and known.match.path:
        unknown = (
            "" if any(one.is_chunk for one in request.segments) else "; no chunk is marked or registered"
        )
        return f"first request with this beginning or these chunks, or they were evicted{unknown}"
    if known is None and not request.wanted:
        return "there is no tree (TreeConfig), so only chunks are reused, and it has none"
    if known is None:
        return "nothing is stored of its chunks yet"
    return f"the prompt is shorter than a block of {BLOCK} tokens"


def plain_plan(request: PromptRequest) -> LinkPlan:
    """A plan that reuses nothing: an ordinary prefill."""
    ids, has_chunk = request.token_ids, any(segment.is_chunk for segment in request.segments)
    report = LinkReport(
        request.label or request.policy.name,
        request.encoder,
        request.namespace,
        prompt_tokens=len(ids),
        computed_tokens=len(ids),
        # By definition full recomputes all that could have been cached.
        recompute_ratio=1.0 if request.policy.name == "full" and has_chunk else 0.0,
        fallback=request.fallback,
        notes=request.notes,
        retries=request.retries,
        miss_reason=miss_reason(request),
    )
    return LinkPlan(ids, (), tuple(range(len(ids))), (), report, request=request)


# -- a plan from the entries that are found -------------------------------------------------------------


def make_plan(request: PromptRequest, variants: VariantPool, without: Collection[KVKey] = ()) -> LinkPlan:
    """Look up every cacheable segment, decide what to load, and let the policy select among cached rows.

    Entries in ``without`` count as not found, as an earlier plan waited for them in vain.
    """
    if not request.reads_cache:
        return plain_plan(request)
    started_at, wanted = time.perf_counter(), request.wanted
    lost, length = frozenset(without), len(request.token_ids)
    fetch = request.fetch
    fetch.lose(lost)
    found = [find_entry(want, fetch, variants) if request.may_reuse(want) else None for want in wanted]
    if fetch.failures:
        request = request.with_note(f"look-ups failed: {'; '.join(dict.fromkeys(fetch.failures))}")
        fetch.failures.clear()
    few = [n for n, want in enumerate(wanted) if _lacks_contexts(request, want, found[n])]
    ids = request.token_ids if few else ()
    observable = tuple(missing_of(request, wanted[n], ids, is_renewed=False) for n in few)
    for number, item in zip(few, observable, strict=True):
        found[number] = None if item.key in request.observes else found[number]
    known = sum(len(want.token_ids) for want, entry in zip(wanted, found, strict=True) if entry)
    known += request.prefix_match.tokens if request.prefix_match is not None else 0

    def recomputed(number: int) -> int:
        want, entry = wanted[number], found[number]
        assert entry is not None, "only what was found is used"
        return recomputed_rows(request.policy, _placed(want, entry), entry.found.kv.layers)

    tokens = [len(want.token_ids) for want in wanted]
    skipped = fetch.decide(found, tokens, recomputed, length, length - known)
    plan = replace(_laid_out(request, found, skipped), observable=observable)
    ms = (time.perf_counter() - started_at) * 1e3 + plan.report.load_ms
    wait = request.waited_ms + (ms if plan.report.loaded_bytes else 0.0)
    report = replace(plan.report, load_ms=ms, wait_ms=wait)
    return _selected(replace(plan, report=report, without=lost, skipped=skipped), request)


def _lacks_contexts(request: PromptRequest, want: Wanted, entry: Entry | None) -> bool:
    """Whether the mean that was found of a chunk should have another context, and may have this prompt's."""
    return (
        entry is not None
        and entry.contexts is not None
        and entry.contexts < CONTEXTS_TO_OBSERVE
        and entry.want is None
        and not isinstance(entry.found.kv, LoadingKV)
        and not request.settles
        and request.may_keep(want.start + len(want.token_ids))
    )


def _laid_out(request: PromptRequest, found: Sequence[Entry | None], skipped: Collection[KVKey]) -> LinkPlan:
    """The plan before any selection; what was ``found`` and ``skipped`` is computed, and not missing."""
    match, ids = request.prefix_match, request.token_ids
    parts, uses = ([], []) if match is None else (match.parts, match.uses)
    pieces = [Piece(kv.start or 0, kv) for _, kv, _ in parts]
    placed, tiers = [chunk for chunk, _, _ in parts], [tier for _, _, tier in parts]
    cold = list[PlacedChunk]()
    missing: dict[KVKey, Missing] = {}
    for want, stored in zip(request.wanted, found, strict=True):
        entry = None if stored is None or stored.key in skipped else stored
        needed = stored is None or (entry is not None and entry.renew)
        if needed and request.may_reuse(want) and request.may_keep(want.start + len(want.token_ids)):
            item = missing_of(request, want, ids, is_renewed=entry is not None)
            missing[item.key] = item
        if entry is None:
            chunk, tier = PlacedChunk(want.key.chunk_id, want.start, len(want.token_ids), False), COMPUTED
            cold.append(chunk)
        else:
            chunk, tier = _placed(want, entry), entry.found.tier
            placed.append(chunk)
            tiers.append(tier)
            keep = None if entry.want is None else len(want.token_ids)
            pieces.append(Piece(want.start, entry.found.kv, keep, entry.first))
        contexts = 0 if entry is None else max(1, len(contexts_of(entry.found.kv)))
        use = ChunkUse(whole_id(chunk.chunk_id), chunk.tokens, tier, exact=chunk.is_exact, contexts=contexts)
        uses.append(use)
    slow = {
        id(piece.kv): piece.kv.nbytes
        for piece, tier in zip(pieces, tiers, strict=True)
        if tier.removeprefix("tree:") not in (*MEMORY_TIERS, TURN, ENCODED)
    }
    first = next((segment for segment in request.segments if segment.token_ids), None)
    begins_with_text = first is not None and not first.is_chunk and uses and uses[0].source != TURN
    report = LinkReport(
        request.label or request.policy.name,
        request.encoder,
        request.namespace,
        prompt_tokens=len(ids),
        chunks=tuple(uses[bool(begins_with_text) :]),
        prefix=uses[0] if begins_with_text else None,
        load_ms=match.ms if match is not None else 0.0,
        loaded_bytes=sum(slow.values()),
        tree_tokens=match.match.tokens if match is not None else 0,
        notes=request.notes,
        retries=request.retries,
        miss_reason=miss_reason(request),
    )
    todo = tuple(missing.values())
    return LinkPlan(ids, tuple(pieces), (), todo, report, tuple(placed), cold=tuple(cold), request=request)


def missing_of(request: PromptRequest, want: Wanted, ids: Ids = (), *, is_renewed: bool = True) -> Missing:
    """What to encode for a wanted segment; unless ``is_renewed``, as the prompt of ``ids`` may compute it."""
    item, key = want.to_encode, want.in_place
    if key is None or is_renewed:  # rows made here of all chunks would take memory for nothing
        return Missing(item.key, item.token_ids, item.encoding, request.epoch, retain=want.retain)
    lengths = tuple(len(segment.token_ids) for segment in request.segments if segment.token_ids)
    encoding = InPromptEncoding(key.encoding, ids[: want.start], segments=lengths[: len(want.before)])
    return Missing(key, want.token_ids, encoding, request.epoch, retain=want.retain)


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
        before=want.before,
        context=entry.key.context,
        sums=sums,
    )


def _selected(plan: LinkPlan, request: PromptRequest) -> LinkPlan:
    """The plan with its rows, and with the policy if that selects during the forward."""
    length, policy, at, end = len(plan.token_ids), request.policy, 0, 0
    for segment in request.segments:
        at += len(segment.token_ids)
        end = at if segment.is_chunk else end
    # A past turn may hold the start of the question: those rows do not run again.
    question = tuple(range(max([end, *(piece.stop for piece in plan.pieces)]), length)) or (length - 1,)
    if isinstance(policy, GuidedPolicy) and any(not chunk.is_exact for chunk in plan.placed):
        return replace(apply_selection(plan, ()), policy=policy, question=question)
    chosen = policy.select(plan.placed)
    selected = apply_selection(plan, chosen)
    if not (isinstance(policy, LayerwisePolicy) and chosen):
        return selected
    return replace(selected, policy=policy, question=question)
