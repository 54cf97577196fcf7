"""Rows that a forward computed: attention sums of its chunks, and copies of its KV for tree and store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from ragcachekit.cancellation import raise_if_cancelled
from ragcachekit.forward.attention import tagged
from ragcachekit.forward.linker import exact_rows, segments_of, stop_of
from ragcachekit.model.kv import ASKED, ChunkKV, Stretch, extract
from ragcachekit.model.rope import Rope
from ragcachekit.model.snapshots import PAST, run
from ragcachekit.plan.link_plan import LinkPlan, Missing
from ragcachekit.plan.prefix_match import PrefixMatch
from ragcachekit.plan.variants import IN_PROMPT, is_average
from ragcachekit.prefix_tree.knowledge_tree import Turn
from ragcachekit.prefix_tree.nodes import Match, blocks_of
from ragcachekit.types import ENCODING_PREFIX, whole_id
from ragcachekit_kernels.dispatch import AttentionOptions, Rows, column_scores, context_mass

MAX_HELD_BYTES = 1 << 30
"""Maximal bytes of queries and keys held for a request, or a batch; beyond it, chunks are encoded anew.

A batch sums what exceeds it at once instead, while the other requests wait.
"""
MAX_QUESTION_ROWS = 32
"""Last rows of a question whose attention is kept."""


# -- attention sums ------------------------------------------------------------------------------------


class QuestionAttention:
    """Attention that each key gets from the last rows of a prompt, layer by layer; mean over rows."""

    def __init__(self, positions: Sequence[int]) -> None:
        self._rows, self._layers = Rows(tuple(positions)), list[Tensor]()
        self.stop = positions[-1] + 1

    def last(self, query: Tensor) -> Tensor:
        """These rows of ``query`` ``[1, heads, rows, head_dim]``."""
        return query[:, :, query.shape[2] - len(self._rows) :]

    def add(self, query: Tensor, key: Tensor, options: AttentionOptions) -> None:
        """One layer: these rows ``[1, heads, rows, head_dim]`` over ``[1, kv_heads, tokens, head_dim]``."""
        scores = column_scores(query[0], key[0], self._rows, options)
        self._layers.append(scores.float() / len(self._rows))

    def of(self, start: int, stop: int) -> dict[str, Tensor]:
        """``[layers, stop - start]``, on the host, by its name in ``sums``; empty if no layer was added."""
        layers = [scores[start:stop] for scores in self._layers]
        return {ASKED: torch.stack(layers).cpu()} if layers else {}


class ContextSums:
    """Attention of chunks of one prompt to its segments (Cache-Craft section 3.1, inter and intra).

    It can be a cache layer's tag (:class:`~ragcachekit.forward.attention.KeyTag`) or the observer of a linked
    forward. ``chunks`` are, per chunk, the lengths of the segments before it, then its own. ``first`` are the
    indices of the chunks' first rows among the computed rows, where these are not the whole prompt.
    ``question`` is added to as well. Sums stay on the device until they are read: copies would wait.
    """

    def __init__(
        self,
        chunks: Sequence[Sequence[int]],
        first: Sequence[int] | None = None,
        question: QuestionAttention | None = None,
    ) -> None:
        self._question = question
        self._lengths = [tuple(lengths) for lengths in chunks]
        self._stretches = [(sum(lengths[:-1]), sum(lengths)) for lengths in chunks]
        self._first = [start for start, _ in self._stretches] if first is None else list(first)
        self._rows = [Rows(tuple(range(start, stop))) for start, stop in self._stretches]
        self._inter: list[list[Tensor]] = [[] for _ in chunks]
        self._intra: list[list[Tensor]] = [[] for _ in chunks]
        self._outward = [torch.zeros(stop - start) for start, stop in self._stretches]

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> None:
        """Add one layer of a batch; the model's own attention computes it."""
        self.add(query, key, options)

    def observe(
        self, layer: int, query: Tensor, key: Tensor, positions: Sequence[int], options: AttentionOptions
    ) -> None:
        """Add one layer of a linked forward; see :class:`~ragcachekit.policies.base.AttentionObserver`."""
        self.add(query[None], key[None], options)

    def add(self, query: Tensor, key: Tensor, options: AttentionOptions) -> None:
        """One layer: ``[1, heads, tokens, head_dim]`` over ``[1, kv_heads, tokens, head_dim]``."""
        if self._question is not None and query.shape[2] == self._question.stop:
            self._question.add(self._question.last(query), key, options)
        for number, (start, stop) in enumerate(self._stretches):
            at = self._first[number]
            rows, keys = query[0, :, at : at + stop - start], key[0, :, :stop]
            mass = context_mass(rows, keys, self._rows[number], self._lengths[number], options)
            self._inter[number].append(mass.inter)
            self._intra[number].append(mass.intra)
            self._outward[number] = self._outward[number].to(mass.outward.device) + mass.outward

    @property
    def sums(self) -> list[dict[str, Tensor]]:
        """Per chunk, on the host; see :class:`ragcachekit.model.kv.ChunkKV`."""
        return [
            {
                "inter": torch.stack(inter).cpu(),
                "intra": torch.stack(self._intra[number]).cpu(),
                "behind": torch.tensor(self._lengths[number][:-1]).float(),
                "outward": (self._outward[number] / len(inter)).cpu(),
            }
            for number, inter in enumerate(self._inter)
        ]


class SummingCache(Cache):  # type: ignore[misc]
    """A dynamic cache whose first forward, on a model with our attention, adds to ``observed``."""

    def __init__(self, observed: ContextSums) -> None:
        super().__init__(layer_class_to_replicate=partial(_SummingLayer, observed))


class _SummingLayer(DynamicLayer):  # type: ignore[misc]
    def __init__(self, sums: ContextSums) -> None:
        super().__init__()
        self._sums: ContextSums | None = sums

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        sums, self._sums = self._sums, None  # the prefill alone, not decoding
        return (keys if sums is None else tagged(keys, sums)), values


# -- missing entries that a request computes -----------------------------------------------------------


class OwnRows(ContextSums):
    """KV and attention of missing chunks (:func:`own_entries`), out of one request's prefill.

    Attention of ``in-prompt`` chunks is summed; means get that of the question. Queries and keys are held and
    summed later (:meth:`settle`): sums would delay the first token. ``nbytes`` are the bytes held,
    ``layers`` the layers that were observed and not given up.
    """

    def __init__(self, plan: LinkPlan, items: Sequence[Missing]) -> None:
        self.items, self._length, self._count = tuple(items), len(plan.token_ids), len(plan.rows)
        place = {row: number for number, row in enumerate(plan.rows)}
        summed = [item for item in items if item.encoding.name == IN_PROMPT]
        chunks = [segments_of(item) for item in summed]
        first = [place[len(item.encoding.before)] for item in summed]
        begin = min(first, default=0)
        super().__init__(chunks, [at - begin for at in first])
        end = max((at + len(item.token_ids) for at, item in zip(first, summed, strict=True)), default=0)
        self._rows_held, self._keys_held = (begin, end), max(map(sum, chunks), default=0)
        last = max((chunk.stop for chunk in plan.chunks), default=0)
        question = [row for row in plan.rows if row >= last][-MAX_QUESTION_ROWS:]
        averages = any(is_average(item.key) for item in items)
        self._asked = QuestionAttention(question) if question and averages else None
        self.nbytes = self.layers = 0
        self._held: list[tuple[Tensor, Tensor, AttentionOptions]] = []
        self._held_questions: list[tuple[Tensor, Tensor, AttentionOptions]] = []

    def cache(self) -> Cache:
        return SummingCache(self)

    def add(self, query: Tensor, key: Tensor, options: AttentionOptions) -> None:
        """Hold a layer's queries and keys."""
        if query.shape[2] != self._count:
            return  # a layer that runs fewer rows
        if self._asked is not None:
            self._held_questions.append((self._asked.last(query).clone(), key, options))
            self.nbytes += self._held_questions[-1][0].nbytes + key.untyped_storage().nbytes()
        if self._keys_held:
            held = _part(query, *self._rows_held), _part(key, 0, self._keys_held)
            self.nbytes += sum(tensor.untyped_storage().nbytes() for tensor in held)
            self._held.append((*held, options))
        self.layers += 1
        if self.nbytes > MAX_HELD_BYTES:
            self._held.clear()
            self._held_questions.clear()
            self.layers = 0

    def settle(self) -> None:
        """Sum and release the held layers."""
        for query, key, options in self._held:
            super().add(query, key, options)
        for query, key, options in self._held_questions:
            assert self._asked is not None
            self._asked.add(query, key, options)
        self._held.clear()
        self._held_questions.clear()
        self.nbytes = 0

    def complete(self, cache: Any) -> bool:
        """Whether every layer of a prefill was observed, and ``cache`` still has its rows."""
        return _holds(cache, self._length) and len(cache.layers) == self.layers

    @torch.no_grad()
    def entries(self, cache: Any, rope: Rope) -> list[tuple[Missing, ChunkKV]]:
        """Copies on the host, keys without RoPE, from a cache for which :meth:`complete` is true."""
        self.settle()
        out, summed = [], iter(self.sums)
        for item in self.items:
            is_prefix = item.encoding.name == ENCODING_PREFIX
            at = Stretch(0, len(item.encoding.before), stop_of(item))
            (kv,) = extract(cache.layers, [at], None if is_prefix else rope, self._length)
            kept = next(summed) if item.encoding.name == IN_PROMPT else {}
            if is_average(item.key) and self._asked is not None:
                kept = self._asked.of(at.start, at.stop)
            out.append((item, ChunkKV(*kv, 0 if is_prefix else None, kept)))
        return out


def _part(tensor: Tensor, start: int, stop: int) -> Tensor:
    """Rows of ``[batch, heads, rows, dim]``; a copy where most of the tensor can be released."""
    part = tensor[:, :, start:stop]
    return part.clone() if 2 * part.nbytes <= part.untyped_storage().nbytes() else part


# -- exact rows for the knowledge tree, and turns ------------------------------------------------------


def with_answer(plan: LinkPlan, answer: Sequence[int], rope: Rope) -> Match | None:
    """The match of a prompt in the tree, its path prolonged by the blocks that end in the answer.

    ``answer`` are the generated ids; the KV of the last one was not computed. If not all of the prompt may be
    kept, the path ends before.
    """
    if plan.prefix_match is None or plan.request is None:
        return None
    match = plan.prefix_match.match
    if plan.request.kept_rows is not None:
        ends = accumulate(step.tokens for step in match.path)
        kept = sum(map(plan.request.may_keep, ends))
        return replace(match, path=match.path[: max(len(match), kept)])
    if rope.depends_on_length or ((snapshots := plan.prefix_match.snapshots) and snapshots.has_state):
        return match
    rest = (*plan.token_ids, *answer[:-1])[sum(step.tokens for step in match.path) :]
    return replace(match, path=(*match.path, *blocks_of(rest, match.root.namespace)))


def captured(
    plan: LinkPlan, match: Match, cache: Any, rope: Rope, taken: Sequence[ChunkKV] = ()
) -> list[ChunkKV]:
    """Copies of the exact KV of the steps after those that the tree had; ``match`` has the steps.

    ``plan`` is as it ran and ``cache`` as generate left it. Empty where the model did not fill the cache
    (Phi-3 drops it where its frequencies change). ``taken`` are the snapshots of its prefill.
    """
    snapshots = plan.prefix_match.snapshots if plan.prefix_match is not None else None
    if snapshots is not None and snapshots.has_state:
        return list(taken)[: len(match.path) - len(match)]
    stretches = stretches_of(plan, match, cache, rope)
    if snapshots is not None:
        steps = [(at.start, at.stop) for at in stretches]
        return snapshots.captured(cache, steps, snapshots.tokens_in(cache), state=False) if steps else []
    sides = extract(cache.layers, stretches, host=False) if stretches else []
    return [ChunkKV(*kv, at.start) for kv, at in zip(sides, stretches, strict=True)]


def stretches_of(
    plan: LinkPlan, match: Match, cache: Any, rope: Rope, taken: Sequence[ChunkKV] = ()
) -> list[Stretch]:
    """Where the steps are whose KV :func:`captured` copies."""
    snapshots = plan.prefix_match.snapshots if plan.prefix_match is not None else None
    if snapshots is not None and snapshots.has_state:
        kept = taken[: len(match.path) - len(match)]
        return [Stretch(0, kv.start or 0, (kv.start or 0) + kv.tokens) for kv in kept]
    length = len(plan.token_ids)
    if rope.depends_on_length and rope.regime(length) != rope.regime(length - 1):
        return []  # a prefill without the prompt's last token would rotate its keys by other frequencies
    last, start = exact_rows(plan), match.tokens
    if last == length:  # then the answer's rows are exact, too
        last = sum(step.tokens for step in match.path)
    stretches: list[Stretch] = []
    for step in match.path[len(match) :]:
        stop = start + step.tokens
        holds = _holds(cache, stop) if snapshots is None else snapshots.tokens_in(cache) >= stop
        if stop > last or not holds:
            break
        stretches.append(Stretch(0, start, stop))
        start = stop
    return stretches


def keeps_turn(plan: LinkPlan, answer: Sequence[int], cache: Any, rope: Rope, most: int) -> bool:
    """Whether :func:`turn_of` makes a turn."""
    match, rows = plan.prefix_match, len(plan.token_ids) + len(answer[:-1])
    if match is None or match.snapshots is not None or rope.depends_on_length or not _holds(cache, rows):
        return False
    if plan.request is not None and plan.request.kept_rows is not None:
        return False
    sides = (side[0, :, :rows] for layer in cache.layers for side in (layer.keys, layer.values))
    return bool(sum(side.nbytes for side in sides) <= most)


def turn_of(plan: LinkPlan, answer: Sequence[int], cache: Any, rope: Rope, most: int) -> Turn | None:
    """A host copy of the prompt with its answer, for the next turn; None above ``most`` bytes.

    ``answer`` is as for :func:`with_answer`. Rows after an approximate row are approximate.
    """
    match, rows = plan.prefix_match, (*plan.token_ids, *answer[:-1])
    if match is None or not keeps_turn(plan, answer, cache, rope, most):
        return None
    exact = exact_rows(plan)
    traces = (whole_id(name) for chunk in plan.placed for name in chunk.context)
    (copied,) = extract(cache.layers, [Stretch(0, 0, len(rows))])
    return Turn(
        match.match.root,
        rows,
        ChunkKV(*copied, 0),
        len(rows) if exact == len(plan.token_ids) else exact,
        match.members.union(traces),
    )


def _holds(cache: Any, columns: int) -> bool:
    layers = getattr(cache, "layers", None) or ()
    return len(layers) > 0 and all(
        getattr(layer, "keys", None) is not None and layer.keys.shape[-2] >= columns for layer in layers
    )


# -- snapshots of models whose chunks cannot be linked ---------------------------------------------------


class Continued(NamedTuple):
    """A cache of the first ``known`` tokens of a prompt, and copies for the tree, in the order of its steps.

    ``argument`` is the name under which the model takes the cache.
    """

    cache: Any
    argument: str
    known: int
    snapshots: tuple[ChunkKV, ...]


def continue_snapshot(
    model: Any, match: PrefixMatch, ids: Tensor, *, ahead: bool = False
) -> Continued | None:
    """Go on after the snapshot that was found, to the last step of the prompt ``ids`` ``[1, tokens]``.

    One forward per part that ends in a state, which is copied: the copies are all that it costs. ``ahead``
    runs all tokens but the last. Models without state stop where the snapshot ends: their rows are copied
    after the answer. None if no cache is needed. Raises Cancelled before a layer or a part.
    """
    layout, known, taken = match.snapshots, match.match.tokens, list[ChunkKV]()
    assert layout is not None
    found, argument = [reused.kv for reused in match.match.found], layout.argument
    cache = layout.restored(found) if found or not layout.has_state else None
    parts = list(_parts(match)) if layout.has_state else []
    if ahead or argument != PAST:
        parts.append(([], ids.shape[1] - 1))
    for steps, stop in parts:
        raise_if_cancelled()
        if stop > known:
            ran = run(model, ids[:, :stop], known, argument if cache is not None else "", cache)
            cache, known = ran.cache, stop
        if steps:
            taken += layout.captured(cache, steps, stop, state=True)
    return None if cache is None else Continued(cache, argument, known, tuple(taken))


def _parts(match: PrefixMatch) -> Iterator[tuple[list[tuple[int, int]], int]]:
    """The steps after a match, cut where a state is copied, each with the tokens up to its end.

    After the first text, every chunk and the last step, and where an earlier prompt began to differ.
    """
    path, stop, steps = match.match.path, match.match.tokens, list[tuple[int, int]]()
    for number, step in enumerate(path[len(match.match) :], len(match.match) + 1):
        start, stop = stop, stop + step.tokens
        steps.append((start, stop))
        ends = number == len(path) or path[number].document
        # At least two tokens: some models compute a single one by other code, with other rounding.
        if (step.document or ends or stop == match.shared) and stop - steps[0][0] > 1:
            yield steps, stop
            steps = []
