"""A decided prompt: its segments, the cached pieces, the rows to compute and what was missing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ragcachekit.link.base import PlacedChunk, SelectionPolicy
from ragcachekit.link.beginning import Beginning
from ragcachekit.link.segments import TokenSegment
from ragcachekit.model.encoding import Encoding
from ragcachekit.reports import LinkReport
from ragcachekit.store.loading import AnyKV, LoadingKV
from ragcachekit.types import KVKey

COMPUTED = "computed"
"""The source of what is not cached."""


@dataclass(frozen=True)
class Missing:
    """An entry that this prompt would have used: what to encode, and under which key to keep it.

    ``epoch`` is the number of forgets when the work on it began (:class:`ForgetEpochs`): a later one that
    concerns its key keeps it from being stored. 0 is before all of them.
    """

    key: KVKey
    token_ids: tuple[int, ...]
    encoding: Encoding
    epoch: int = 0


@dataclass(frozen=True, eq=False)
class Piece:
    """A cached stretch of the prompt: ``kv``, or its first ``keep`` tokens, belongs at ``start``."""

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
    again : callable or None
        The plan without some entries (by key), which turned out not to come.
    skipped : tuple of KVKey
        Entries that were found and not taken, as computing their rows is quicker than loading them.
    resident : int
        Layers that should be there before a forward on an accelerator begins.
    beginning : Beginning or None
        What the knowledge tree knew of the prompt; None without a tree.
    epoch : int
        The number of forgets when the prompt came; 0 is before all of them.
    """

    token_ids: tuple[int, ...]
    pieces: tuple[Piece, ...]
    rows: tuple[int, ...]
    missing: tuple[Missing, ...]
    report: LinkReport
    placed: tuple[PlacedChunk, ...] = ()
    policy: SelectionPolicy | None = None
    question: tuple[int, ...] = ()
    again: Callable[[frozenset[KVKey]], LinkPlan] | None = None
    skipped: tuple[KVKey, ...] = ()
    resident: int = 0
    beginning: Beginning | None = None
    epoch: int = 0

    @property
    def loads(self) -> tuple[LoadingKV, ...]:
        """The entries among its pieces that are, or were, read while it is at work."""
        return tuple(piece.kv for piece in self.pieces if isinstance(piece.kv, LoadingKV))

    def reported(self, change: Callable[[LinkReport], LinkReport]) -> LinkPlan:
        """The plan with another report, also where it is made again."""
        again = self.again
        return replace(
            self,
            report=change(self.report),
            again=None if again is None else lambda lost: again(lost).reported(change),
        )

    def since(self, epoch: int) -> LinkPlan:
        """The plan of a prompt that came at this epoch, also where it is made again."""
        again = self.again
        return replace(
            self,
            epoch=epoch,
            missing=tuple(replace(item, epoch=epoch) for item in self.missing),
            again=None if again is None else lambda lost: again(lost).since(epoch),
        )

    @property
    def kept(self) -> int:
        """Number of rows taken from the cache as they are."""
        return len(self.token_ids) - len(self.rows)

    def without_last(self) -> LinkPlan:
        """The same plan for the prompt without its last token (linked ahead of generate, not inside it)."""
        return replace(self, token_ids=self.token_ids[:-1], rows=self.rows[:-1], pieces=_crop(self))


def _crop(plan: LinkPlan) -> tuple[Piece, ...]:
    last = len(plan.token_ids) - 1
    return tuple(
        piece if piece.stop <= last else replace(piece, keep=last - piece.start)
        for piece in plan.pieces
        if piece.start < last
    )


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
