"""A planned prompt: its cached pieces, the rows to compute and what was missing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from ragcachekit.model.encoding import Encoding
from ragcachekit.model.kv import ChunkKV
from ragcachekit.plan.lookup import Fetch
from ragcachekit.plan.prefix_match import PrefixMatch
from ragcachekit.plan.request import PromptRequest
from ragcachekit.policies.base import PlacedChunk, SelectionPolicy
from ragcachekit.prefix_tree.base import BLOCK
from ragcachekit.reports import ChunkUse, LinkReport
from ragcachekit.store.base import NullStore
from ragcachekit.store.loader import AnyKV, LoadingKV
from ragcachekit.types import Ids, KVKey

COMPUTED = "computed"
"""Source of chunks that are not cached."""


@dataclass(frozen=True)
class Missing:
    """A missing entry: what to encode, and under which key to store it.

    ``epoch`` is the number of forgets when its request began (:class:`ForgetEpochs`); after a later one that
    concerns its key it is not stored.
    """

    key: KVKey
    token_ids: tuple[int, ...]
    encoding: Encoding
    epoch: int = 0

    @property
    def content(self) -> Ids:
        """Token ids of all that the KV is computed from: the context, then the chunk."""
        near, joint = getattr(self.encoding, "neighbours", ()), getattr(self.encoding, "joint", ())
        between = (token for ids in near for token in (*ids, *joint))
        return (*self.encoding.before, *between, *self.token_ids)

    @property
    def id_bytes(self) -> int:
        """Bytes that its entry takes for the ids of its :attr:`content`."""
        return 4 * len(self.content)


@dataclass(frozen=True, eq=False)
class Piece:
    """Cached KV for a part of the prompt: rows of ``kv`` from ``first`` on belong at ``start``.

    All of them, or the next ``keep`` tokens.
    """

    start: int
    kv: AnyKV
    keep: int | None = None
    first: int = 0

    @property
    def tokens(self) -> int:
        """Tokens that are used."""
        return self.kv.tokens - self.first if self.keep is None else self.keep

    @property
    def rows(self) -> slice:
        """The rows of ``kv`` that are used."""
        return slice(self.first, self.first + self.tokens)

    @property
    def stop(self) -> int:
        """Position after its last token."""
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

    def __repr__(self) -> str:
        return f"LinkPlan({self.report})"

    def _repr_html_(self) -> str:
        return self.report._repr_html_()

    @property
    def chunks(self) -> tuple[PlacedChunk, ...]:
        """The chunks of the prompt in order, cached or not."""
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
        """Number of rows taken from the cache as they are."""
        return len(self.token_ids) - len(self.rows)

    def with_note(self, note: str) -> LinkPlan:
        """The plan with another note in its report."""
        return replace(self, report=replace(self.report, notes=(*self.report.notes, note)))

    def without_kv(self) -> LinkPlan:
        """The plan once it has run: no tensors, so that its entries can be evicted, but all else."""

        def place(piece: Piece) -> Piece:
            nothing = (torch.empty(1, piece.kv.tokens, 1, device="meta"),)
            return replace(piece, kv=ChunkKV(nothing, nothing, piece.kv.start, {}, piece.kv.quantised))

        return replace(
            self,
            pieces=tuple(map(place, self.pieces)),
            placed=tuple(replace(chunk, attended=None, sums={}) for chunk in self.placed),
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
        return "first request with this beginning, or it was evicted"
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
        miss_reason=miss_reason(request),
    )
    return LinkPlan(ids, (), tuple(range(len(ids))), (), report, request=request)
