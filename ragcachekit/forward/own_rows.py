"""``in-prompt`` entries out of the very request that missed them, where its rows are those of its prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache

from ragcachekit.forward.attention_sums import ContextSums, SummingCache
from ragcachekit.forward.exact_rows import exact_rows
from ragcachekit.model.encoding import InPromptEncoding
from ragcachekit.model.extract import Stretch, extract
from ragcachekit.model.kv import ChunkKV
from ragcachekit.model.rope.rotation import Rope
from ragcachekit.plan.link_plan import LinkPlan, Missing
from ragcachekit_kernels.dispatch import AttentionOptions

MOST_HELD = 1 << 30
"""Maximal bytes of queries and keys held for one request; beyond it, its chunks are encoded anew."""


def segments_of(item: Missing) -> tuple[int, ...]:
    """Lengths of the segments before an ``in-prompt`` chunk, and of the chunk itself."""
    assert isinstance(item.encoding, InPromptEncoding)
    return (*item.encoding.segments, len(item.token_ids))


def stop_of(item: Missing) -> int:
    """Position after the chunk's last token in its prompt."""
    return len(item.encoding.behind) + len(item.token_ids)


def own_entries(plan: LinkPlan) -> tuple[Missing, ...]:
    """Missing entries whose rows the request computes, after exact rows only.

    Entries after approximate rows need a forward of their own: later they would be taken for exact.
    """
    computed, last = set(plan.rows), exact_rows(plan, rotated=True)
    return tuple(
        item
        for item in plan.missing
        if isinstance(item.encoding, InPromptEncoding)
        and stop_of(item) <= last
        and computed.issuperset(range(len(item.encoding.behind), stop_of(item)))
    )


class OwnRows:
    """KV and attention sums of missing chunks, out of one request's prefill.

    Parameters
    ----------
    plan : LinkPlan
        Decided; by itself in its batch.
    items : sequence of Missing
        From :func:`own_entries`.
    """

    def __init__(self, plan: LinkPlan, items: Sequence[Missing]) -> None:
        self.items = tuple(items)
        self._length = len(plan.token_ids)
        place = {row: number for number, row in enumerate(plan.rows)}
        self._sums = _PrefillSums(
            [segments_of(item) for item in items],
            [place[len(item.encoding.behind)] for item in items],
            len(plan.rows),
        )

    def cache(self) -> Cache:
        """An empty cache for an ordinary prefill of the prompt."""
        return SummingCache(self._sums)

    def observe(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        positions: Sequence[int],
        options: AttentionOptions,
    ) -> None:
        """One layer of a linked forward; see :class:`~ragcachekit.policies.base.Observer`."""
        self._sums.observe(query[None], key[None], options)

    def complete(self, cache: Any) -> bool:
        """Whether every layer of a prefill was observed, and ``cache`` still has its rows."""
        layers = getattr(cache, "layers", None) or ()
        held = all(layer.keys is not None and layer.keys.shape[-2] >= self._length for layer in layers)
        return held and 0 < len(layers) == len(self._sums.held)

    @torch.no_grad()
    def entries(self, cache: Any, rope: Rope) -> list[tuple[Missing, ChunkKV]]:
        """Copies on the host, keys without RoPE, from a cache for which :meth:`complete` is true."""
        stretches = [Stretch(0, len(item.encoding.behind), stop_of(item)) for item in self.items]
        sides = extract(cache.layers, stretches, rope, self._length)
        self._sums.settle()
        kvs = (ChunkKV(*kv, None, sums) for kv, sums in zip(sides, self._sums.sums, strict=True))
        return list(zip(self.items, kvs, strict=True))


class _PrefillSums(ContextSums):
    """Sums over one forward of ``rows`` rows; its chunks begin at ``first`` among them."""

    def __init__(self, chunks: Sequence[Sequence[int]], first: Sequence[int], rows: int) -> None:
        super().__init__(chunks, first)
        self._count = rows
        self._nbytes = 0
        self.held: list[tuple[torch.Tensor, torch.Tensor, AttentionOptions]] = []

    def observe(self, query: torch.Tensor, key: torch.Tensor, options: AttentionOptions) -> None:
        """Hold a layer's queries and keys: summing them here would delay the first token."""
        if query.shape[2] != self._count:
            return  # a layer that runs fewer rows
        self._nbytes += query.untyped_storage().nbytes() + key.untyped_storage().nbytes()
        self.held.append((query, key, options))
        if self._nbytes > MOST_HELD:
            self.held.clear()

    def settle(self) -> None:
        """Sum and release the held layers."""
        for query, key, options in self.held:
            super().observe(query, key, options)
        self.held.clear()
