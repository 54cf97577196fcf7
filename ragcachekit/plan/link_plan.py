"""A planned prompt: its cached pieces, the rows to compute and what was missing."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ragcachekit.model.encoding import Encoding
from ragcachekit.plan.prefix_match import PrefixMatch
from ragcachekit.plan.request import PromptRequest
from ragcachekit.policies.base import PlacedChunk, SelectionPolicy
from ragcachekit.reports import LinkReport
from ragcachekit.store.loading.load import AnyKV, LoadingKV
from ragcachekit.types import KVKey

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


@dataclass(frozen=True, eq=False)
class Piece:
    """Cached KV for a part of the prompt: ``kv``, or its first ``keep`` tokens, belongs at ``start``."""

    start: int
    kv: AnyKV
    keep: int | None = None

    @property
    def tokens(self) -> int:
        """Tokens that are used."""
        return self.kv.tokens if self.keep is None else self.keep

    @property
    def stop(self) -> int:
        """Position after its last token."""
        return self.start + self.tokens


@dataclass(frozen=True, eq=False)
class LinkPlan:
    """The complete plan of one prompt.

    Attributes
    ----------
    token_ids : tuple of int
        The whole prompt.
    pieces : tuple of Piece
        Cached KV, in order, not overlapping.
    rows : tuple of int
        Ascending positions to compute: recomputed, missing and new ones, always including the last.
    missing : tuple of Missing
        Entries to encode after the answer.
    report : LinkReport
        With a ``policy``: as if that selected nothing more.
    placed : tuple of PlacedChunk
        The cached chunks of ``pieces``.
    policy : SelectionPolicy or None
        Selects among the cached rows during the forward; None once everything is selected.
    question : tuple of int
        With a ``policy``: positions of the question, which is what is computed after the last chunk.
    request : PromptRequest or None
        The planned request; None for a plan made by hand, which cannot be planned again.
    without : frozenset of KVKey
        Entries that counted as not found.
    skipped : tuple of KVKey
        Entries that were found, but are quicker to compute than to load.
    resident : int
        Layers to load before a forward on an accelerator begins.
    cold : tuple of PlacedChunk
        Chunks that are computed: missing or skipped.
    """

    token_ids: tuple[int, ...]
    pieces: tuple[Piece, ...]
    rows: tuple[int, ...]
    missing: tuple[Missing, ...]
    report: LinkReport
    placed: tuple[PlacedChunk, ...] = ()
    policy: SelectionPolicy | None = None
    question: tuple[int, ...] = ()
    request: PromptRequest | None = None
    without: frozenset[KVKey] = frozenset()
    skipped: tuple[KVKey, ...] = ()
    resident: int = 0
    cold: tuple[PlacedChunk, ...] = ()

    @property
    def chunks(self) -> tuple[PlacedChunk, ...]:
        """The chunks of the prompt in order, cached or not."""
        return tuple(sorted((*self.placed, *self.cold), key=lambda chunk: chunk.start))

    @property
    def beginning(self) -> PrefixMatch | None:
        """The prompt's match in the knowledge tree; None without a tree."""
        return None if self.request is None else self.request.beginning

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

    def without_last(self) -> LinkPlan:
        """The plan for the prompt without its last token, for a forward ahead of ``generate``."""
        last = len(self.token_ids) - 1
        pieces = tuple(
            piece if piece.stop <= last else replace(piece, keep=last - piece.start)
            for piece in self.pieces
            if piece.start < last
        )
        return replace(self, token_ids=self.token_ids[:-1], rows=self.rows[:-1], pieces=pieces)


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
    )
    return LinkPlan(ids, (), tuple(range(len(ids))), (), report, request=request)
