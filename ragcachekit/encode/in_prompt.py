"""Encoders that run a chunk inside a prompt: ``in-prompt`` (Cache-Craft 3.1) and ``average:n`` (ours)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from inspect import signature
from typing import Any, Self

import torch
from torch import Tensor
from transformers import DynamicCache

from ragcachekit.encode.encoders import prefill
from ragcachekit.forward.linker import segments_of, stop_of
from ragcachekit.forward.prefill import Replan, check_finite, prepare, replanned
from ragcachekit.forward.rows import MAX_HELD_BYTES, ContextSums, QuestionAttention, SummingCache
from ragcachekit.model.encoding import AverageEncoding, InPromptEncoding
from ragcachekit.model.kv import (
    ASKED,
    CONTEXTS,
    SENSITIVITY,
    ChunkKV,
    Stretch,
    context_number,
    contexts_of,
    extract,
)
from ragcachekit.model.rope import Rope
from ragcachekit.plan.link_plan import LinkPlan, Missing
from ragcachekit.store.loader import LoadFailed
from ragcachekit.types import Ids, chunk_id


def runs(items: Iterable[Missing]) -> list[list[Missing]]:
    """Items that one forward serves: each one's prompt is how the first one's begins."""
    out: list[list[Missing]] = []
    for item in sorted(items, key=stop_of, reverse=True):
        for run in out:
            if _serves(run[0], item):
                run.append(item)
                break
        else:
            out.append([item])
    return out


class InPromptEncoder:
    """Runs a prompt up to its last missing chunk and extracts the KV of all its missing chunks.

    The forward is an ordinary one; the attention of these chunks is summed segment by segment. The model
    must be admitted: its attention goes through :func:`ragcachekit.forward.attention.install`.
    """

    def __init__(self, model: Any, rope: Rope) -> None:
        self._model, self._rope = model, rope

    def encode(
        self, items: Iterable[Missing], summed: Callable[[Missing], bool] = lambda _: True, question: Ids = ()
    ) -> Iterator[tuple[Missing, ChunkKV]]:
        """Yield every item of an :class:`InPromptEncoding` with its KV, keys without RoPE, on the host.

        Attention is summed for those that are ``summed``; on a CPU that takes as long as the forward. A
        ``question`` is appended to each prompt that has room, for what it attends to (``asked``).
        """
        for run in runs(items):
            fits = stop_of(run[0]) + len(question) <= self._rope.exact_up_to
            asked = [item for item in run if summed(item)], question if fits else ()
            kvs = self.forward(run, *asked)[::-1]
            for item in run:
                yield item, kvs.pop()  # what was stored is released

    @torch.no_grad()
    def forward(self, run: Sequence[Missing], summed: Sequence[Missing], question: Ids = ()) -> list[ChunkKV]:
        """Run the model over the prompt of ``run`` once; the KV of each of its chunks."""
        encoding, stop = run[0].encoding, stop_of(run[0])
        asked = QuestionAttention(range(stop, stop + len(question))) if question else None
        sums = ContextSums([segments_of(item) for item in summed], question=asked)
        cache = SummingCache(sums) if summed or question else DynamicCache()
        prompt = (*encoding.before, *run[0].token_ids, *question)
        length = prefill(self._model, [prompt], encoding.length, cache)
        stretches = [Stretch(0, len(item.encoding.before), stop_of(item)) for item in run]
        sides = extract(cache.layers, stretches, self._rope, length)
        found = dict(zip(map(id, summed), sums.sums if summed else (), strict=True))
        out = []
        for kv, item, at in zip(sides, run, stretches, strict=True):
            own = found.get(id(item), {})
            own |= {} if asked is None else asked.of(at.start, at.stop)
            out.append(ChunkKV(*kv, None, own))
        return out


@torch.no_grad()
def observe(model: Any, rope: Rope, plan: LinkPlan, replan: Replan) -> list[tuple[Missing, ChunkKV]] | None:
    """Run the linked forward of a prompt for the entries that it ``observes``, after all that precedes them.

    Empty if it holds too many bytes; None if the model attends more often than it stores.
    """
    assert plan.request is not None, "planned from a prompt"
    own, observes = None, plan.request.observes
    while own is None:
        plan = replace(plan, missing=tuple(item for item in plan.missing if item.key in observes))
        try:
            linked = prepare(model, rope, plan, capture=True)
            if (own := linked.own) is None:
                return []
            inputs, keep = dict(linked.inputs), "logits_to_keep"  # as in generate: some layers run one row
            for name in {"input_ids", "position_ids"} & inputs.keys():
                inputs[name] = inputs[name][:, -len(linked.plan.rows) :]  # the others are kept
            last = {keep: 1} if keep in signature(model.forward).parameters else {}
            check_finite(linked.plan, model(**inputs, **last, use_cache=True).logits)
        except LoadFailed as failed:
            own, plan = None, replanned(plan, failed, replan)
    cache = inputs["past_key_values"]
    if own.complete(cache):
        return own.entries(cache, rope)
    return [] if own.nbytes > MAX_HELD_BYTES else None


def _serves(first: Missing, item: Missing) -> bool:
    """Whether a forward of ``first`` passes through all of ``item``, under the same frequencies."""
    one, other = first.key, item.key
    if (one.fingerprint, one.namespace, one.encoding) != (other.fingerprint, other.namespace, other.encoding):
        return False
    whole = (*first.encoding.before, *first.token_ids)
    return whole[: stop_of(item)] == (*item.encoding.before, *item.token_ids)


class RunningMean:
    """Running means of the encodings of one chunk, in float32 (Welford's method)."""

    def __init__(self) -> None:
        self._contexts: tuple[int, ...] = ()
        self._asked: tuple[Tensor, int] | None = None  # a mean, and of how many

    @classmethod
    def of(cls, kv: ChunkKV) -> Self:
        """The mean that ``kv`` is, to go on with."""
        mean, contexts = cls(), contexts_of(kv)
        mean.add(kv, 0)
        mean._contexts = contexts
        if mean._asked is not None:
            mean._asked = mean._asked[0], len(contexts)
        if SENSITIVITY in kv.sums:
            mean._squares = list((kv.sums[SENSITIVITY].square() * ((len(contexts) - 1) / 2)).unbind())
        return mean

    def add(self, kv: ChunkKV, context: int) -> None:
        """Add an encoding, keys without RoPE, and the number of its context."""
        # Copied: the means are updated in place, and the store may have the KV as another entry.
        sides = [[t.to("cpu", torch.float32, copy=True) for t in side] for side in (kv.keys, kv.values)]
        if ASKED in kv.sums and (self._asked is None or self._asked[0].shape == kv.sums[ASKED].shape):
            asked, n = self._asked or (torch.zeros_like(kv.sums[ASKED]), 0)
            self._asked = asked + (kv.sums[ASKED] - asked) / (n + 1), n + 1
        self._contexts, count = (*self._contexts, context), len(self._contexts) + 1
        if count == 1:
            self._dtypes = [[tensor.dtype for tensor in side] for side in (kv.keys, kv.values)]
            self._means = sides
            self._squares = [torch.zeros(kv.tokens) for _ in kv.keys]
            return
        for mean, new in zip(self._means[0], sides[0], strict=True):
            mean += (new - mean) / count
        for layer, (mean, new) in enumerate(zip(self._means[1], sides[1], strict=True)):
            moved = new - mean
            mean += moved / count
            self._squares[layer] = self._squares[layer] + (moved * (new - mean)).sum((0, 2))

    def result(self) -> ChunkKV:
        """The mean, with the sensitivity of its tokens if it is of two contexts or more."""
        keys, values = (
            tuple(tensor.to(dtype) for tensor, dtype in zip(side, dtypes, strict=True))
            for side, dtypes in zip(self._means, self._dtypes, strict=True)
        )
        sums, count = {CONTEXTS: torch.tensor(self._contexts, dtype=torch.float32)}, len(self._contexts)
        if count > 1:
            # Twice the variance: the mean square of the difference between two contexts.
            moved = 2 / (count - 1) * torch.stack(self._squares).clamp_min(0)
            sums[SENSITIVITY] = moved.sqrt()
        if self._asked is not None:
            sums[ASKED] = self._asked[0]
        return ChunkKV(keys, values, None, sums)


class AverageEncoder:
    """Encodes a chunk after every context of its :class:`AverageEncoding`, and takes the mean.

    Chunks that are encoded after each other share forwards: a block of three chunks, each after the other
    two, takes three forwards, each with the chunks in another cyclic order.
    ``question`` are the token ids of a question about any chunk.
    """

    def __init__(self, in_prompts: InPromptEncoder, question: Ids = ()) -> None:
        self._in_prompts, self._question = in_prompts, question

    def encode(
        self, items: Iterable[Missing], plain: Iterable[Missing] = ()
    ) -> Iterator[tuple[Missing, ChunkKV]]:
        """Yield every item with its KV, keys without RoPE, and the ``sensitivity`` of its tokens.

        ``plain`` are the same chunks after the system text alone, as :func:`takes_along` found them.
        """
        alone = {(item.token_ids, item.encoding.before): item for item in plain}
        for block in blocks(items):
            yield from self._together({item.token_ids: item for item in block}, alone)

    def _together(
        self, items: dict[Ids, Missing], alone: dict[tuple[Ids, Ids], Missing]
    ) -> Iterator[tuple[Missing, ChunkKV]]:
        means = {ids: RunningMean() for ids in items}
        samples = (
            _after(item, group)
            for (ids, item) in items.items()
            for group in _groups(item, (ids, item.encoding.before) in alone)
        )

        def is_plain(sample: Missing) -> bool:
            return sample.encoding.before == items[sample.token_ids].encoding.before

        for sample, kv in self._in_prompts.encode(samples, lambda _: False, self._question):
            own = items[sample.token_ids]
            if is_plain(sample):
                plain = alone.pop((own.token_ids, own.encoding.before), None)
                if plain is not None:
                    yield plain, replace(kv, sums={})
                if () not in _encoding(own).groups:
                    continue
            context = context_number(chunk_id(sample.encoding.before))
            means[sample.token_ids].add(kv, context)
        for ids, item in items.items():
            yield item, means.pop(ids).result()


def takes_along(items: Iterable[Missing], plain: Iterable[Missing]) -> list[Missing]:
    """Those of ``plain`` that the forwards for ``items`` compute as well: each chunk is first in one."""
    firsts = {(item.token_ids, item.encoding.before) for item in items}
    return [item for item in plain if (item.token_ids, item.encoding.before) in firsts]


def blocks(items: Iterable[Missing]) -> Iterator[list[Missing]]:
    """Consecutive chunks of ``average:n`` that share forwards: they are in each other's contexts."""
    block, known = list[Missing](), set[Ids]()
    for item in items:
        own, before = {item.token_ids, *_encoding(item).neighbours}, item.encoding.before
        joins = block and before == block[0].encoding.before and not own.isdisjoint(known)
        if block and not (joins and len(block) < 2 * len(own) - 1):
            yield block
            block, known = [], set()
        block.append(item)
        known |= own
    if block:
        yield block


def _groups(item: Missing, is_plain: bool) -> Iterable[tuple[Ids, ...]]:
    """The groups of chunks to encode it after; ``is_plain``: after none as well."""
    groups = _encoding(item).groups
    return dict.fromkeys(((), *groups)) if is_plain else groups


def _after(item: Missing, group: tuple[Ids, ...]) -> Missing:
    """The item as the forward of a prompt computes it after these chunks."""
    encoding = _encoding(item)
    lengths = [len(ids) + len(encoding.joint) for ids in group]
    lengths = [len(encoding.before), *lengths] if encoding.before else lengths
    rows = InPromptEncoding(encoding.name, encoding.context(group), segments=tuple(lengths))
    return Missing(item.key, item.token_ids, rows)


def _encoding(item: Missing) -> AverageEncoding:
    assert isinstance(item.encoding, AverageEncoding)
    return item.encoding
