"""Copies of KV that a request computed: exact rows for the tree, and missing entries that it computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers.cache_utils import Cache

from ragcachekit.forward.attention_sums import ContextSums, SummingCache, SummingObserver
from ragcachekit.model.encoding import InPromptEncoding
from ragcachekit.model.extract import Stretch, extract
from ragcachekit.model.kv import ChunkKV
from ragcachekit.model.rope.rotation import Rope
from ragcachekit.plan.encodings import IN_PROMPT
from ragcachekit.plan.link_plan import LinkPlan, Missing
from ragcachekit.policies.base import LayerwisePolicy
from ragcachekit.prefix_tree.base import Match, blocks_of
from ragcachekit.prefix_tree.conversations import Turn
from ragcachekit.types import ENCODING_PREFIX, whole_id
from ragcachekit_kernels.dispatch import AttentionOptions

MAX_HELD_BYTES = 1 << 30
"""Maximal bytes of queries and keys held for a request, or a batch; beyond it, chunks are encoded anew.

A batch sums what exceeds it at once instead, while the other requests wait.
"""


_EXACT_IN_PLACE = (ENCODING_PREFIX, "standalone", "system")
"""Encodings whose context is a real prompt's beginning, KV and all, beside those of a prompt's own rows."""


def segments_of(item: Missing) -> tuple[int, ...]:
    """Lengths of the segments that a chunk is encoded behind, and of the chunk itself."""
    encoding, behind = item.encoding, len(item.encoding.before)
    before = encoding.segments if isinstance(encoding, InPromptEncoding) else (behind,) * (behind > 0)
    return (*before, len(item.token_ids))


def stop_of(item: Missing) -> int:
    """Position after the chunk's last token in its prompt."""
    return len(item.encoding.before) + len(item.token_ids)


def own_entries(plan: LinkPlan) -> tuple[Missing, ...]:
    """Missing entries whose rows the request computes behind just their context, after exact rows only.

    So stand all chunks that are stored as the prompt computed them, the ``prefix``, the ``system`` chunk
    behind it, and a ``standalone`` one at position 0. Entries after approximate rows need a forward of their
    own: later they would be taken for exact.
    """
    computed, last = set(plan.rows), exact_rows(plan, rotated=True)
    return tuple(
        item
        for item in plan.missing
        if (item.encoding.name in _EXACT_IN_PLACE or isinstance(item.encoding, InPromptEncoding))
        and stop_of(item) <= last
        and plan.token_ids[: stop_of(item)] == (*item.encoding.before, *item.token_ids)
        and computed.issuperset(range(len(item.encoding.before), stop_of(item)))
    )


class OwnRows(SummingObserver):
    """KV and attention sums of missing chunks (:func:`own_entries`), out of one request's prefill."""

    def __init__(self, plan: LinkPlan, items: Sequence[Missing]) -> None:
        self.items = tuple(items)
        self._length = len(plan.token_ids)
        place = {row: number for number, row in enumerate(plan.rows)}
        self._sums = _PrefillSums(
            [segments_of(item) for item in items],
            [place[len(item.encoding.before)] for item in items],
            len(plan.rows),
        )
        super().__init__(self._sums)

    def cache(self) -> Cache:
        """An empty cache for an ordinary prefill of the prompt."""
        return SummingCache(self._sums)

    def complete(self, cache: Any) -> bool:
        """Whether every layer of a prefill was observed, and ``cache`` still has its rows."""
        return _holds(cache, self._length) and len(cache.layers) == self._sums.layers

    @property
    def nbytes(self) -> int:
        """Bytes of the queries and keys that are held to be summed."""
        return self._sums.nbytes

    def settle(self) -> None:
        """Sum and release them."""
        self._sums.settle()

    @torch.no_grad()
    def entries(self, cache: Any, rope: Rope) -> list[tuple[Missing, ChunkKV]]:
        """Copies on the host, keys without RoPE, from a cache for which :meth:`complete` is true."""
        self.settle()
        out = []
        for item, sums in zip(self.items, self._sums.sums, strict=True):
            is_prefix = item.encoding.name == ENCODING_PREFIX
            at = Stretch(0, len(item.encoding.before), stop_of(item))
            (kv,) = extract(cache.layers, [at], None if is_prefix else rope, self._length)
            kept = sums if item.encoding.name == IN_PROMPT else {"attended": sums["attended"]}
            out.append((item, ChunkKV(*kv, 0 if is_prefix else None, kept)))
        return out


class _PrefillSums(ContextSums):
    """Sums over one forward of ``rows`` rows; of these, ``first`` are the chunks' first ones."""

    def __init__(self, chunks: Sequence[Sequence[int]], first: Sequence[int], rows: int) -> None:
        begin, sizes = min(first), [lengths[-1] for lengths in chunks]
        super().__init__(chunks, [at - begin for at in first])
        self._rows_held = begin, max(at + size for at, size in zip(first, sizes, strict=True))
        self._keys_held = max(map(sum, chunks))
        self._count = rows
        self.nbytes = self.layers = 0  # bytes held, and layers that were observed and not given up
        self.held: list[tuple[torch.Tensor, torch.Tensor, AttentionOptions]] = []

    def observe(self, query: torch.Tensor, key: torch.Tensor, options: AttentionOptions) -> None:
        """Hold a layer's queries and keys: summing them here would delay the first token."""
        if query.shape[2] != self._count:
            return  # a layer that runs fewer rows
        held = _part(query, *self._rows_held), _part(key, 0, self._keys_held)
        self.nbytes += sum(tensor.untyped_storage().nbytes() for tensor in held)
        self.held.append((*held, options))
        self.layers += 1
        if self.nbytes > MAX_HELD_BYTES:
            self.held.clear()
            self.layers = 0

    def settle(self) -> None:
        """Sum and release the held layers."""
        for query, key, options in self.held:
            super().observe(query, key, options)
        self.held.clear()
        self.nbytes = 0


def _part(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Rows of ``[batch, heads, rows, dim]``; a copy where most of the tensor can be released."""
    part = tensor[:, :, start:stop]
    return part.clone() if 2 * part.nbytes <= part.untyped_storage().nbytes() else part


def exact_rows(plan: LinkPlan, rotated: bool = False) -> int:
    """Number of rows from the start that equal those of an ordinary prefill.

    These are rows computed after exact rows alone, and exact pieces; with ``rotated`` also pieces stored
    without RoPE. Recomputed rows count, unless the policy cuts rows from layer to layer.
    """
    computed = set(plan.rows)
    layerwise = isinstance(plan.policy, LayerwisePolicy)
    layerwise |= plan.request is not None and isinstance(plan.request.policy, LayerwisePolicy)
    for chunk, piece in zip(plan.placed, plan.pieces, strict=True):
        if chunk.is_exact and not piece.kv.quantised and (rotated or piece.kv.start is not None):
            continue
        for row in range(piece.start, piece.stop):
            if layerwise or row not in computed:
                return row
    return len(plan.token_ids)


def with_answer(plan: LinkPlan, answer: Sequence[int], rope: Rope) -> Match | None:
    """The match of a prompt in the tree, its path prolonged by the blocks that end in the answer.

    ``answer`` are the generated ids; the KV of the last one was not computed.
    """
    if plan.prefix_match is None:
        return None
    match = plan.prefix_match.match
    if rope.depends_on_length:
        return match
    rest = (*plan.token_ids, *answer[:-1])[sum(step.tokens for step in match.path) :]
    return replace(match, path=(*match.path, *blocks_of(rest, match.root.namespace)))


def captured(plan: LinkPlan, match: Match, cache: Any, rope: Rope) -> list[ChunkKV]:
    """Copies of the exact KV of the steps after those that the tree had; ``match`` has the steps.

    ``plan`` is as it ran and ``cache`` as generate left it. Empty where the model did not fill the cache
    (Phi-3 drops it where its frequencies change).
    """
    length = len(plan.token_ids)
    if rope.depends_on_length and rope.regime(length) != rope.regime(length - 1):
        return []  # a prefill without the prompt's last token would rotate its keys by other frequencies
    last, start = exact_rows(plan), match.tokens
    if last == length:  # then the answer's rows are exact, too
        last = sum(step.tokens for step in match.path)
    stretches: list[Stretch] = []
    for step in match.path[len(match) :]:
        stop = start + step.tokens
        if stop > last or not _holds(cache, stop):
            break
        stretches.append(Stretch(0, start, stop))
        start = stop
    if not stretches:
        return []
    sides = extract(cache.layers, stretches, host=False)
    return [ChunkKV(*kv, at.start) for kv, at in zip(sides, stretches, strict=True)]


def turn_of(plan: LinkPlan, answer: Sequence[int], cache: Any, rope: Rope, most: int) -> Turn | None:
    """A host copy of the prompt with its answer, for the next turn; None above ``most`` bytes.

    ``answer`` are the generated ids; the KV of the last one was not computed. Rows after an approximate row
    are approximate.
    """
    match = plan.prefix_match
    rows = (*plan.token_ids, *answer[:-1])
    if match is None or rope.depends_on_length or not _holds(cache, len(rows)):
        return None
    sides = [side[0, :, : len(rows)] for layer in cache.layers for side in (layer.keys, layer.values)]
    if sum(t.numel() * t.element_size() for t in sides) > most:
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
