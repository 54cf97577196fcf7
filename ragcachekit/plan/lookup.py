"""Look-up of one prompt: its exact beginning in the knowledge tree, and its chunks' entries in the store."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace

from ragcachekit.model.encoding import AverageEncoding, InPromptEncoding
from ragcachekit.model.kv import SENSITIVITY, ChunkKV, KVLayout, misfit
from ragcachekit.plan.encodings import VariantPool, Wanted, weight_at
from ragcachekit.plan.load_planner import Candidate, LoadPlanner, RowCost
from ragcachekit.policies.base import PlacedChunk
from ragcachekit.prefix_tree.knowledge_tree import KnowledgeTree
from ragcachekit.prefix_tree.nodes import BLOCK, Match, Root, Step, blocks_of, text_step
from ragcachekit.prompt.segments import TokenSegment
from ragcachekit.reports import ChunkUse
from ragcachekit.store.base import KVStore
from ragcachekit.store.loader import Hit, Loader, LoadingKV
from ragcachekit.types import Ids, KVKey, chunk_id, whole_id

log = logging.getLogger(__name__)

RENEW_ABOVE = 0.25
"""A chunk whose best variant costs more is encoded again in the present context."""

TURN = "turn"
"""Source of rows of the conversation's last turn."""


@dataclass(frozen=True)
class Entry:
    """A stored entry for a wanted chunk; ``renew``: encode the chunk in the present context as well.

    Of an entry of a whole chunk (``want``) whose part is in the prompt, rows from ``first`` on are used.
    """

    key: KVKey
    found: Hit
    renew: bool = False
    want: Wanted | None = None
    first: int = 0


class Fetch:
    """Look-ups for one prompt, each done once for all of its plans.

    A bare store reads everything during the look-up. Without a ``planner`` everything found is used. KV of
    another ``layout`` is a miss, and deleted from the store.
    """

    def __init__(
        self,
        store: KVStore | Loader,
        planner: LoadPlanner | None = None,
        layout: KVLayout | None = None,
    ) -> None:
        self._store, self._planner, self._layout = store, planner, layout
        self._known: dict[KVKey, Hit | None] = {}
        self._lost: frozenset[KVKey] = frozenset()

    def get(self, key: KVKey, tokens: int, weight: float = 1.0) -> Hit | None:
        """The entry under ``key`` for that many tokens; loads from slow tiers have not started.

        ``weight`` is its usefulness, for eviction.
        """
        if key in self._lost:
            return None
        if key not in self._known:
            self._known[key] = self._look(key, tokens, weight)
        return self._known[key]

    def without(self, lost: frozenset[KVKey]) -> Fetch:
        """A view in which these are not found; both share their results."""
        if not lost:
            return self
        other = copy(self)
        other._lost = lost
        return other

    def decide(
        self, entries: Sequence[Entry | None], use: Callable[[int], RowCost], total: int, computed: int
    ) -> tuple[KVKey, ...]:
        """Begin the loads that are quicker than computing; returns the keys of the others.

        ``use`` gives the row cost of an entry by index; ``total`` and ``computed`` are those of
        :meth:`.LoadPlanner.choose`.
        """
        slow: dict[LoadingKV, list[int]] = {}
        for number, entry in enumerate(entries):
            if entry is not None and isinstance(entry.found.kv, LoadingKV):
                slow.setdefault(entry.found.kv, []).append(number)
        if not slow or not isinstance(self._store, Loader):
            return ()
        chosen = [True] * len(slow)
        if self._planner is not None:
            candidates = [Candidate.of(kv, [use(i) for i in at]) for kv, at in slow.items()]
            waiting = {i for at in slow.values() for i in at}
            here = [use(i) for i, entry in enumerate(entries) if entry is not None and i not in waiting]
            chosen = self._planner.choose(candidates, total, computed + sum(one.recomputed for one in here))
        skipped = [kv for kv, load in zip(slow, chosen, strict=True) if not load]
        self._store.begin(kv for kv in slow if kv not in skipped)
        self._store.release(skipped)
        for kv in skipped:
            self._known.pop(kv.key, None)  # released: a later plan opens it again
        return tuple(kv.key for kv in skipped)

    def _look(self, key: KVKey, tokens: int, weight: float) -> Hit | None:
        if isinstance(self._store, Loader):
            hit = self._store.open(key, weight)
        else:
            found = self._store.get(key, weight)
            hit = Hit(found.kv, found.tier) if found is not None else None
        reason = misfit(key, hit.kv, tokens, self._layout) if hit is not None else None
        if hit is None or reason is None:
            return hit
        log.warning("tier %s had an entry that is not used and leaves the store: %s", hit.tier, reason)
        try:
            self._store.discard(key)
        except Exception:  # a user's own store may fail, or lack this method
            log.warning("the entry could not be dropped", exc_info=True)
        return None


def find_entry(want: Wanted, fetch: Fetch, pool: VariantPool) -> Entry | None:
    """The entry of exactly a wanted chunk's context, else the best one of another, or None.

    For a chunk that is in the prompt in part, rows of the whole chunk serve where none of just that part
    are stored, or only a prompt's own rows.
    """
    entry = _find(want, fetch, pool)
    if want.whole is not None and (entry is None or entry.renew):
        whole = _find(want.whole, fetch, pool)
        if whole is not None and (entry is None or not whole.renew):
            return replace(whole, want=want.whole, first=want.first)
    return entry


def keys_for(want: Wanted, pool: VariantPool) -> list[KVKey]:
    """Keys under which :func:`find_entry` may find an entry for a wanted chunk, in its order."""
    whole = keys_for(want.whole, pool) if want.whole is not None else []
    if isinstance(want.encoding, InPromptEncoding):
        return [want.key, *(fit.key for fit in pool.ranked(want.key, want.before)), *whole]
    return [key for key in (want.key, pool.average(want.average), want.plain) if key is not None] + whole


def _find(want: Wanted, fetch: Fetch, pool: VariantPool) -> Entry | None:
    tokens = len(want.token_ids)
    cost = 0.0 if want.exact else pool.cost(want.key, want.before)
    found = fetch.get(want.key, tokens, weight_at(cost))
    entry = Entry(want.key, found) if found is not None else None
    if isinstance(want.encoding, InPromptEncoding):
        if entry is None:
            return _variant(want, fetch, pool)
        pool.add(entry.key, entry.found.kv)  # an earlier or other process may have encoded it
        pool.used(entry.key, want.before)
        return entry
    to_average = isinstance(want.encoding, AverageEncoding)
    if entry is not None and (to_average or not want.in_place):
        return entry
    # A chunk whose companions are not known is named as after the system text alone.
    if (mean := pool.average(want.average)) is not None:
        if (found := fetch.get(mean, tokens)) is not None:
            # A prompt's own rows are to be replaced by a mean.
            return Entry(mean, found, want.exact or (to_average and SENSITIVITY not in found.kv.sums))
        pool.discard(mean)
    if entry is None and want.plain is not None and (found := fetch.get(want.plain, tokens)) is not None:
        return Entry(want.plain, found, renew=True)  # until the mean is stored
    return entry


def _variant(want: Wanted, fetch: Fetch, pool: VariantPool) -> Entry | None:
    for fit in pool.ranked(want.key, want.before):
        found = fetch.get(fit.key, len(want.token_ids), weight_at(fit.cost))
        if found is not None:
            pool.used(fit.key, want.before)
            return Entry(fit.key, found, renew=fit.cost > RENEW_ABOVE)
        pool.discard(fit.key)
    return None


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
    def parts(self) -> list[tuple[PlacedChunk, ChunkKV, str]]:
        """Its parts as chunks (no policy recomputes the exact ones), with their KV and tier."""
        out, before = list[tuple[PlacedChunk, ChunkKV, str]](), tuple[str, ...]()
        for node in self.match.found:
            ids, context = node.step.ids, (*before, *node.step.ids[:-1])
            start, tokens = node.kv.start or 0, node.step.tokens
            chunk = PlacedChunk(ids[-1], start, tokens, True, before=context, context=context)
            out.append((chunk, node.kv, node.tier))
            before = (*before, *ids)
        for past in self.past:
            start, tokens = past.kv.start or 0, past.kv.tokens
            out.append((PlacedChunk(past.chunk_id, start, tokens, past.exact, before=before), past.kv, TURN))
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


def match_prefix(
    tree: KnowledgeTree,
    place: tuple[Root, tuple[Step, ...]],
    token_ids: Ids,
    segments: Sequence[TokenSegment],
    ids: frozenset[str],
    layout: KVLayout | None,
) -> PrefixMatch:
    """Look up a prompt in the tree; ``ids`` are those of its cacheable segments and of all before them."""
    started_at, epoch, past = time.perf_counter(), tree.turns.epoch, list[TurnRows]()
    root, match = place[0], _match(tree, *place, layout)
    found = tree.turns.longest(root, token_ids) if not root.regime else None
    if found is not None:
        turn, tokens = found
        stop = _not_inside_a_chunk(min(tokens, len(token_ids) - 1), segments)
        middle = min(max(turn.exact, match.tokens), stop)
        for start, end, exact in ((match.tokens, middle, True), (middle, stop, False)):
            if start < end:
                name = chunk_id(token_ids[start:end], root.namespace)
                past.append(TurnRows(turn.rows(start, end), name, exact))
        ids = turn.members | ids if past else ids
    return PrefixMatch(match, (time.perf_counter() - started_at) * 1e3, tuple(past), ids, epoch)


def _match(tree: KnowledgeTree, root: Root, path: tuple[Step, ...], layout: KVLayout | None) -> Match:
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
