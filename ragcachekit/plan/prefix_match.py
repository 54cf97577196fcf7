"""The exact beginning of a prompt in the knowledge tree, and the rows of its conversation's last turn."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from ragcachekit.model.kv import ChunkKV, KVLayout
from ragcachekit.model.snapshots import SnapshotLayout
from ragcachekit.plan.encodings import Wanted
from ragcachekit.policies.base import PlacedChunk
from ragcachekit.prefix_tree.knowledge_tree import KnowledgeTree
from ragcachekit.prefix_tree.nodes import BLOCK, Match, Root, Step, blocks_of, text_step
from ragcachekit.prompt.segments import TokenSegment
from ragcachekit.reports import ChunkUse
from ragcachekit.types import Ids, chunk_id, whole_id

log = logging.getLogger(__name__)

TURN = "turn"
"""Source of rows of the conversation's last turn."""

TurnRows = tuple[ChunkKV, str, bool]
"""Rows of an earlier turn, their id, and whether they are exact: all of them or none."""


@dataclass(frozen=True, eq=False)
class PrefixMatch:
    """The known beginning of one prompt: exact nodes, pinned by this object, then rows of its last turn."""

    match: Match
    ms: float = 0.0  # of the look-up
    past: tuple[TurnRows, ...] = ()  # rows of the last turn after the match, in order
    members: frozenset[str] = frozenset()  # ids of segments up to the last chunk, and of the turn's
    epoch: int = 0  # of the turns, at the look-up
    snapshots: SnapshotLayout | None = None  # of a model whose chunks cannot be linked
    shared: int = 0  # its tokens that an earlier prompt had, although it cannot go on from there
    held: Match | None = None  # keeps the nodes pinned, where ``match`` has only some of them

    @property
    def tokens(self) -> int:
        """Known rows; only chunks after them are looked up in the chunk store."""
        return self.match.tokens + sum(kv.tokens for kv, *_ in self.past)

    @property
    def parts(self) -> list[tuple[PlacedChunk, ChunkKV, str]]:
        """Its parts as chunks (no policy recomputes the exact ones), with their KV and tier."""
        out, before = list[tuple[PlacedChunk, ChunkKV, str]](), tuple[str, ...]()
        for node in self.match.found:
            ids, context = node.step.ids, (*before, *node.step.ids[:-1])
            start, tokens = node.kv.start or 0, node.step.tokens
            chunk = PlacedChunk(ids[-1], start, tokens, True, before=context, context=context)
            out.append((chunk, node.kv, node.tier))
            before = (*before, *ids)
        for kv, name, exact in self.past:
            out.append((PlacedChunk(name, kv.start or 0, kv.tokens, exact, before=before), kv, TURN))
            before = (*before, name)
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
        return out + [ChunkUse(name, kv.tokens, TURN, exact=exact) for kv, name, exact in self.past]


def match_prefix(
    tree: KnowledgeTree,
    place: tuple[Root, tuple[Step, ...]],
    token_ids: Ids,
    segments: Sequence[TokenSegment],
    ids: frozenset[str],
    layout: KVLayout | SnapshotLayout | None,
) -> PrefixMatch:
    """Look up a prompt in the tree; ``ids`` are those of its cacheable segments and of all before them."""
    started_at, epoch, past = time.perf_counter(), tree.turns.epoch, list[TurnRows]()
    root, match = place[0], _match(tree, *place, layout)
    if isinstance(layout, SnapshotLayout):
        ms, known = (time.perf_counter() - started_at) * 1e3, match.found
        last = max(
            (n for n, node in enumerate(known, 1) if node.kv.has_state or not layout.has_state), default=0
        )
        usable = replace(match, found=known[:last])
        return PrefixMatch(usable, ms, (), ids, epoch, layout, match.tokens, match)
    found = tree.turns.longest(root, token_ids) if not root.regime else None
    if found is not None:
        turn, tokens = found
        stop = _not_inside_a_chunk(min(tokens, len(token_ids) - 1), segments)
        middle = min(max(turn.exact, match.tokens), stop)
        for start, end, exact in ((match.tokens, middle, True), (middle, stop, False)):
            if start < end:
                name = chunk_id(token_ids[start:end], root.namespace)
                past.append((turn.rows(start, end), name, exact))
        ids = turn.members | ids if past else ids
    return PrefixMatch(match, (time.perf_counter() - started_at) * 1e3, tuple(past), ids, epoch)


def _match(
    tree: KnowledgeTree, root: Root, path: tuple[Step, ...], layout: KVLayout | SnapshotLayout | None
) -> Match:
    """The tree's match without nodes of another layout, which are deleted."""
    match = tree.match(root, path)
    for number, node in enumerate(match.found):
        if layout is not None and (reason := layout.misfit(node.kv, node.step.tokens)):
            log.warning("a node of the knowledge tree is not used: %s", reason)
            with suppress(Exception):  # it is a miss all the same
                tree.discard(root, path[: number + 1])
            return replace(match, found=match.found[:number])
    return match


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
    left at the end of the prompt is in no step. Chunk ids come from ``wanted``, where they are there: hashing
    chunks again would cost more than the look-up.
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
            name = names.get(start) or segment.name(namespace)
            steps.append(Step((*ids, name), len(tokens), True, tokens))
            text = ()
        else:
            text = (*text, *segment.token_ids) if text else segment.token_ids
        start += len(segment.token_ids)
    return (*steps, *blocks_of(text, namespace))
