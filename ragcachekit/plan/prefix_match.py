"""Match of a prompt with the knowledge tree: its exact beginning, then rows of its last turn."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ragcachekit.model.kv import ChunkKV, KVLayout
from ragcachekit.model.rope import Rope
from ragcachekit.plan.encodings import Wanted
from ragcachekit.policies.base import PlacedChunk
from ragcachekit.prefix_tree.base import BLOCK, Match, Root, Step, blocks_of, text_step
from ragcachekit.prefix_tree.knowledge_tree import KnowledgeTree
from ragcachekit.prompt.segments import TokenSegment
from ragcachekit.reports import ChunkUse
from ragcachekit.types import Ids, chunk_id, whole_id

log = logging.getLogger(__name__)

TURN = "turn"
"""Source of rows of the conversation's last turn."""


@dataclass(frozen=True, eq=False)
class TurnRows:
    """Rows of an earlier turn, all of them exact or none."""

    kv: ChunkKV
    chunk_id: str
    exact: bool


@dataclass(frozen=True, eq=False)
class PrefixMatch:
    """The known beginning of one prompt: exact nodes, pinned by this object, then rows of its last turn."""

    match: Match
    ms: float = 0.0  # of the look-up
    past: tuple[TurnRows, ...] = ()  # rows of the last turn after the match, in order
    members: frozenset[str] = frozenset()  # ids of segments up to the last chunk, and of the turn's
    epoch: int = 0  # of the turns, at the look-up

    @property
    def tokens(self) -> int:
        """Known rows; only chunks after them are looked up in the chunk store."""
        return self.match.tokens + sum(past.kv.tokens for past in self.past)

    @property
    def kvs(self) -> list[ChunkKV]:
        """KV in order; ``start`` is its position."""
        return [reused.kv for reused in self.match.found] + [past.kv for past in self.past]

    @property
    def sources(self) -> list[str]:
        """Tiers of its KV, in order."""
        return [reused.tier for reused in self.match.found] + [TURN for _ in self.past]

    @property
    def placed(self) -> list[PlacedChunk]:
        """Its parts as chunks; no policy recomputes the exact ones."""
        out: list[PlacedChunk] = []
        before: tuple[str, ...] = ()
        for reused in self.match.found:
            ids, start = reused.step.ids, reused.kv.start or 0
            context = (*before, *ids[:-1])
            out.append(PlacedChunk(ids[-1], start, reused.step.tokens, True, before=context, context=context))
            before = (*before, *ids)
        for past in self.past:
            placed = PlacedChunk(past.chunk_id, past.kv.start or 0, past.kv.tokens, past.exact, before=before)
            out.append(placed)
            before = (*before, past.chunk_id)
        return out

    @property
    def uses(self) -> list[ChunkUse]:
        """Its parts as reported: the prompt's first text, every chunk with the text before it, the rest."""
        out: list[ChunkUse] = []
        tokens, chunks, found = 0, 0, self.match.found
        for number, reused in enumerate(found):
            tokens += reused.step.tokens
            chunks += reused.step.document
            after = found[number + 1].step if number + 1 < len(found) else None
            if reused.step.document or after is None or (after.document and not chunks):
                out.append(ChunkUse(whole_id(reused.step.ids[-1]), tokens, reused.tier, exact=True))
                tokens = 0
        return out + [ChunkUse(past.chunk_id, past.kv.tokens, TURN, exact=past.exact) for past in self.past]


class PrefixMatcher:
    """Look-ups in one tree for one model; ``layout`` as for :class:`.lookup.Fetch`."""

    def __init__(self, tree: KnowledgeTree, rope: Rope, layout: KVLayout) -> None:
        self._layout = layout
        self.tree = tree
        self._rope = rope

    def read(
        self,
        segments: Sequence[TokenSegment],
        wanted: Sequence[Wanted],
        fingerprint: str,
        namespace: str,
    ) -> PrefixMatch:
        """Look up a prompt; ``wanted`` are all its cacheable segments."""
        started_at = time.perf_counter()
        epoch = self.tree.turns.epoch
        match = self._match(*self.place(segments, wanted, fingerprint, namespace))
        past, former = self._past(match, segments, namespace)
        members = former.union(whole_id(i) for want in wanted for i in (*want.before, want.key.chunk_id))
        ms = (time.perf_counter() - started_at) * 1e3
        return PrefixMatch(match, ms, past, members, epoch)

    def place(
        self, segments: Sequence[TokenSegment], wanted: Sequence[Wanted], fingerprint: str, namespace: str
    ) -> tuple[Root, tuple[Step, ...]]:
        """Root and steps of a prompt in the tree."""
        length = sum(len(segment.token_ids) for segment in segments)
        regime = str(self._rope.regime(length)) if self._rope.depends_on_length else ""
        return Root(fingerprint, namespace, regime), path_of(segments, wanted, namespace)

    def _match(self, root: Root, path: tuple[Step, ...]) -> Match:
        """The tree's match, without nodes of another layout, which are deleted if possible."""
        match = self.tree.match(root, path)
        for number, reused in enumerate(match.found):
            if reason := self._layout.misfit(reused.kv, reused.step.tokens):
                log.warning("a node of the knowledge tree is not used: %s", reason)
                try:
                    self.tree.discard(root, path[: number + 1])
                except Exception:
                    log.warning("the node could not be deleted", exc_info=True)
                return replace(match, found=match.found[:number])
        return match

    def _past(
        self, match: Match, segments: Sequence[TokenSegment], namespace: str
    ) -> tuple[tuple[TurnRows, ...], frozenset[str]]:
        """Rows of the last turn after the match, exact ones first, and that turn's members."""
        nothing: tuple[tuple[TurnRows, ...], frozenset[str]] = ((), frozenset())
        turns = self.tree.turns
        if not turns.budget or self._rope.depends_on_length:
            return nothing
        ids = tuple(i for segment in segments for i in segment.token_ids)
        found = turns.longest(match.root, ids)
        if found is None:
            return nothing
        stop = _not_inside_a_chunk(min(found.tokens, len(ids) - 1), segments)
        middle = min(max(found.turn.exact, match.tokens), stop)
        past = tuple(
            TurnRows(found.turn.rows(a, b), chunk_id(ids[a:b], namespace), exact)
            for a, b, exact in ((match.tokens, middle, True), (middle, stop, False))
            if a < b
        )
        return (past, found.turn.members) if past else nothing


def _not_inside_a_chunk(position: int, segments: Sequence[TokenSegment]) -> int:
    """That position, or the start of the chunk around it: the store may have the whole chunk."""
    start = 0
    for segment in segments:
        stop = start + len(segment.token_ids)
        if start < position < stop and segment.is_chunk:
            return start
        start = stop
    return position


def path_of(segments: Sequence[TokenSegment], wanted: Sequence[Wanted], namespace: str) -> tuple[Step, ...]:
    """The prompt as steps of the tree: text in blocks, and every chunk with the rest of the text before it.

    What the first text has beyond whole blocks is a step of its own, as many chunks may follow it. What is
    left at the end of the prompt is in no step. Chunk ids come from ``wanted``: hashing chunks again would
    cost more than the look-up.
    """
    names = {want.start: want.key.chunk_id for want in wanted}
    steps: list[Step] = []
    start, text = 0, Ids()
    for segment in segments:
        if segment.is_chunk and segment.token_ids:
            steps += blocks_of(text, namespace)
            rest = text[len(text) // BLOCK * BLOCK :]
            if rest and len(text) == start:
                steps.append(text_step(rest, namespace))
                rest = ()
            ids = (chunk_id(rest, namespace),) if rest else ()
            tokens = (*rest, *segment.token_ids)
            steps.append(Step((*ids, names[start]), len(tokens), True, tokens))
            text = ()
        else:
            text = (*text, *segment.token_ids) if text else segment.token_ids
        start += len(segment.token_ids)
    return (*steps, *blocks_of(text, namespace))
