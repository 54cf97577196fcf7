"""Decide, for one prompt, which rows are kept, which are recomputed and which were never cached."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ragcachekit.link.base import GuidedPolicy, LayerwisePolicy, PlacedChunk, SelectionPolicy
from ragcachekit.link.encodings import Encodings
from ragcachekit.link.variants import VariantPool, look_up
from ragcachekit.model.encoder import Encoding
from ragcachekit.model.kv import ChunkKV
from ragcachekit.store.base import KVStore
from ragcachekit.types import ChunkUse, KVKey, LinkReport


@dataclass(frozen=True)
class TokenSegment:
    """A tokenised segment; ``is_chunk`` marks retrieved text."""

    token_ids: tuple[int, ...]
    is_chunk: bool


@dataclass(frozen=True)
class Missing:
    """An entry that this prompt would have used: what to encode, and under which key to keep it."""

    key: KVKey
    token_ids: tuple[int, ...]
    encoding: Encoding


@dataclass(frozen=True, eq=False)
class Piece:
    """A cached stretch of the prompt: ``kv`` belongs at ``start``."""

    start: int
    kv: ChunkKV


@dataclass(frozen=True, eq=False)
class LinkPlan:
    """One prompt, decided.

    Attributes
    ----------
    token_ids : tuple of int
        The whole prompt, in order.
    pieces : tuple of Piece
        Cached stretches, in order, not overlapping.
    rows : tuple of int
        Ascending positions to compute: recomputed, missing and new ones. The last position of the
        prompt is always among them.
    missing : tuple of Missing
    report : LinkReport
        As things stand: of a plan that is open, as if nothing were recomputed.
    placed : tuple of PlacedChunk
        The cached chunks that ``pieces`` hold.
    policy : SelectionPolicy or None
        Who chooses among the cached rows with the model's help; None once everything is decided.
    question : tuple of int
        Positions of the question: what is computed behind the last chunk. Only for such a policy.
    """

    token_ids: tuple[int, ...]
    pieces: tuple[Piece, ...]
    rows: tuple[int, ...]
    missing: tuple[Missing, ...]
    report: LinkReport
    placed: tuple[PlacedChunk, ...] = ()
    policy: SelectionPolicy | None = None
    question: tuple[int, ...] = ()

    @property
    def kept(self) -> int:
        """Number of rows taken from the cache as they are."""
        return len(self.token_ids) - len(self.rows)

    def without_last(self) -> LinkPlan:
        """The same plan for the prompt without its last token (linked ahead of generate, not inside it)."""
        return replace(self, token_ids=self.token_ids[:-1], rows=self.rows[:-1], pieces=_crop(self))


def _crop(plan: LinkPlan) -> tuple[Piece, ...]:
    last = len(plan.token_ids) - 1
    out = []
    for piece in plan.pieces:
        if piece.start + piece.kv.tokens > last:
            keep = last - piece.start
            if keep == 0:
                continue
            kv = piece.kv
            piece = Piece(
                piece.start,
                ChunkKV(tuple(k[:, :keep] for k in kv.keys), tuple(v[:, :keep] for v in kv.values), kv.start),
            )
        out.append(piece)
    return tuple(out)


def plain_plan(
    segments: Sequence[TokenSegment], policy: str, encoder: str, namespace: str, fallback: str | None = None
) -> LinkPlan:
    """A plan that reuses nothing: an ordinary prefill."""
    ids = tuple(i for segment in segments for i in segment.token_ids)
    has_chunk = any(segment.is_chunk for segment in segments)
    report = LinkReport(
        policy,
        encoder,
        namespace,
        prompt_tokens=len(ids),
        computed_tokens=len(ids),
        # By definition full recomputes all that could have been cached.
        recompute_ratio=1.0 if policy == "full" and has_chunk else 0.0,
        fallback=fallback,
    )
    return LinkPlan(ids, (), tuple(range(len(ids))), (), report)


def make_plan(
    segments: Sequence[TokenSegment],
    policy: SelectionPolicy,
    encodings: Encodings,
    store: KVStore,
    fingerprint: str,
    namespace: str,
    variants: VariantPool | None = None,
) -> LinkPlan:
    """Look every cacheable segment up and let the policy choose among the cached rows.

    ``variants`` are what chunks of the encoder ``in-prompt`` may use in other contexts than their own.
    """
    if not policy.reads_cache:
        return plain_plan(segments, policy.name, encodings.name, namespace)
    begun = time.perf_counter()
    ids = tuple(i for segment in segments for i in segment.token_ids)
    placed: list[PlacedChunk] = []
    pieces: list[Piece] = []
    missing: dict[KVKey, Missing] = {}
    uses: list[ChunkUse] = []
    wanted = list(encodings.wanted(segments, fingerprint, namespace))
    for want, entry in zip(wanted, look_up(wanted, policy, store, variants), strict=True):
        tokens = len(want.token_ids)
        if entry is None or entry.renew:
            missing[want.key] = Missing(want.key, want.token_ids, want.encoding)
        if entry is None:
            uses.append(ChunkUse(want.key.chunk_id, tokens, "computed"))
            continue
        kv, exact = entry.found.kv, want.exact and entry.key == want.key
        placed.append(
            PlacedChunk(
                want.key.chunk_id,
                want.start,
                tokens,
                exact,
                attended=kv.sums.get("attended"),
                before=want.before,
                behind=entry.key.context,
                sums=kv.sums,
            )
        )
        pieces.append(Piece(want.start, kv))
        uses.append(ChunkUse(want.key.chunk_id, tokens, entry.found.tier, exact=exact))
    load_ms = (time.perf_counter() - begun) * 1e3
    report = LinkReport(
        policy.name,
        encodings.name,
        namespace,
        prompt_tokens=len(ids),
        chunks=tuple(uses),
        load_ms=load_ms,
    )
    plan = LinkPlan(ids, tuple(pieces), (), tuple(missing.values()), report, tuple(placed))
    question = tuple(range(_end_of_chunks(segments), len(ids))) or (len(ids) - 1,)
    if isinstance(policy, GuidedPolicy) and any(not chunk.exempt for chunk in placed):
        return replace(decided(plan, ()), policy=policy, question=question)
    chosen = policy.select(placed)
    if not (isinstance(policy, LayerwisePolicy) and chosen):
        return decided(plan, chosen)
    return replace(decided(plan, chosen), policy=policy, question=question)


def decided(
    plan: LinkPlan, chosen: Iterable[int], per_layer: Sequence[int] | None = None, layers: int = 1
) -> LinkPlan:
    """The plan with these cached positions recomputed, and its report.

    ``per_layer`` says how many cached rows each of the ``layers`` layers recomputed, where that differs
    from the number chosen.

    Raises
    ------
    ValueError
        If positions lie outside the cached chunks.
    """
    ids, placed, picked = plan.token_ids, plan.placed, set(chosen)
    cached = {p for chunk in placed for p in range(chunk.start, chunk.stop)}
    if len(ids) - 1 in cached:
        # The last row gives the next token's logits, so it is computed whatever the policy says.
        picked.add(len(ids) - 1)
    if not picked <= cached:
        raise ValueError(f"policy {plan.report.policy} chose positions outside the cached chunks")
    exact = {p for chunk in placed if chunk.exempt for p in range(chunk.start, chunk.stop)}
    kept = cached - picked
    spent = sum(per_layer) / layers if per_layer is not None else len(picked)
    report = replace(
        plan.report,
        exact_tokens=len(kept & exact),
        approximate_tokens=len(kept - exact),
        recomputed_tokens=len(picked),
        computed_tokens=len(ids) - len(cached),
        recompute_ratio=spent / len(cached) if cached else 0.0,
        chunks=_with_recomputed(plan.report.chunks, placed, picked),
    )
    rows = tuple(p for p in range(len(ids)) if p not in kept)
    return replace(plan, rows=rows, report=report, policy=None)


def _end_of_chunks(segments: Sequence[TokenSegment]) -> int:
    at = end = 0
    for segment in segments:
        at += len(segment.token_ids)
        end = at if segment.is_chunk else end
    return end


def _with_recomputed(
    uses: Sequence[ChunkUse], placed: Sequence[PlacedChunk], chosen: set[int]
) -> tuple[ChunkUse, ...]:
    remaining = iter(placed)
    out = []
    for use in uses:
        if use.source != "computed":
            chunk = next(remaining)
            use = replace(use, recomputed=sum(p in chosen for p in range(chunk.start, chunk.stop)))
        out.append(use)
    return tuple(out)
