"""``in-prompt`` entries out of the very request that missed them, where its rows are those of its prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer

from ragcachekit.forward.attention_sums import ContextSums
from ragcachekit.forward.tagged_keys import tagged
from ragcachekit.model.encoding import InPromptEncoding
from ragcachekit.model.extract import Stretch, extract
from ragcachekit.model.kv import ChunkKV
from ragcachekit.model.rope.rotation import Rope
from ragcachekit.plan.link_plan import LinkPlan, Missing
from ragcachekit.policies.base import LayerwisePolicy
from ragcachekit_kernels.dispatch import AttentionOptions

MOST_HELD = 1 << 30
"""Bytes of queries and keys that one request may leave behind; with more, its chunks are encoded anew."""


def own_entries(plan: LinkPlan) -> tuple[Missing, ...]:
    """Missing entries whose rows the request computes, behind nothing but rows that are exact.

    Behind approximate rows they would be approximate, and later taken for exact behind the same context:
    those entries need a forward of their own.
    """
    computed, last = set(plan.rows), _first_approximate(plan)
    return tuple(
        item
        for item in plan.missing
        if isinstance(item.encoding, InPromptEncoding)
        and _stop(item) <= last
        and computed.issuperset(range(len(item.encoding.behind), _stop(item)))
    )


class OwnRows:
    """What one request's prefill computes of its missing chunks, and what these attend to meanwhile.

    Parameters
    ----------
    plan : LinkPlan
        Decided; by itself in its batch.
    items : sequence of Missing
        As :func:`own_entries` names them.
    """

    def __init__(self, plan: LinkPlan, items: Sequence[Missing]) -> None:
        self.items = tuple(items)
        self._length = len(plan.token_ids)
        place = {row: number for number, row in enumerate(plan.rows)}
        self._sums = _PrefillSums(
            [_segments(item) for item in items],
            [place[len(item.encoding.behind)] for item in items],
            len(plan.rows),
        )

    def cache(self) -> Cache:
        """An empty cache for an ordinary prefill of the prompt, which is watched."""
        return _WatchedCache(self._sums)

    def observe(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        positions: Sequence[int],
        options: AttentionOptions,
    ) -> None:
        """One layer of a linked forward; see :class:`~ragcachekit.forward.link_rows.Observer`."""
        self._sums.observe(query[None], key[None], options)

    def complete(self, cache: Any) -> bool:
        """Whether all was seen of a prefill into ``cache``, and the rows are still there."""
        layers = getattr(cache, "layers", None) or ()
        held = all(layer.keys is not None and layer.keys.shape[-2] >= self._length for layer in layers)
        return held and self._sums.complete(len(layers))

    @torch.no_grad()
    def entries(self, cache: Any, rope: Rope) -> list[tuple[Missing, ChunkKV]]:
        """Copies on the host, keys without RoPE, out of the request's cache, which is :meth:`complete`."""
        stretches = [Stretch(0, len(item.encoding.behind), _stop(item)) for item in self.items]
        sides = extract(cache.layers, stretches, rope, self._length)
        self._sums.settle()
        kvs = (ChunkKV(*kv, None, sums) for kv, sums in zip(sides, self._sums.sums, strict=True))
        return list(zip(self.items, kvs, strict=True))


class _PrefillSums(ContextSums):
    """Of chunks whose rows begin at ``first`` among the ``rows`` of a forward; of no other forward."""

    def __init__(self, chunks: Sequence[Sequence[int]], first: Sequence[int], rows: int) -> None:
        super().__init__(chunks, first)
        self._count = rows
        self._nbytes = 0
        self._held: list[tuple[torch.Tensor, torch.Tensor, AttentionOptions]] = []

    def observe(self, query: torch.Tensor, key: torch.Tensor, options: AttentionOptions) -> None:
        """Hold on to a layer's queries and keys: summing them here would delay the first token."""
        if query.shape[2] != self._count:
            return  # layers that run fewer rows: then not all is seen
        self._nbytes += query.untyped_storage().nbytes() + key.untyped_storage().nbytes()
        self._held.append((query, key, options))
        if self._nbytes > MOST_HELD:
            self._held.clear()

    def complete(self, layers: int) -> bool:
        """Whether every layer was seen once."""
        return 0 < layers == len(self._held)

    def settle(self) -> None:
        """Sum what was seen, and let go of it."""
        for query, key, options in self._held:
            super().observe(query, key, options)
        self._held.clear()


class _WatchedLayer(DynamicLayer):  # type: ignore[misc]
    def __init__(self, sums: ContextSums) -> None:
        super().__init__()
        self._sums: ContextSums | None = sums

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        sums, self._sums = self._sums, None  # the prefill alone, not what is generated
        return (keys if sums is None else tagged(keys, sums)), values


class _WatchedCache(Cache):  # type: ignore[misc]
    def __init__(self, sums: ContextSums) -> None:
        super().__init__(layer_class_to_replicate=lambda: _WatchedLayer(sums))


def _first_approximate(plan: LinkPlan) -> int:
    """The first row that is not what an ordinary prefill of the prompt computes."""
    computed, layerwise = set(plan.rows), isinstance(plan.policy, LayerwisePolicy)
    for chunk, piece in zip(plan.placed, plan.pieces, strict=True):
        if chunk.is_exact and not piece.kv.quantised:
            continue
        for row in range(piece.start, piece.stop):
            if layerwise or row not in computed:
                return row
    return len(plan.token_ids)


def _segments(item: Missing) -> tuple[int, ...]:
    assert isinstance(item.encoding, InPromptEncoding)
    return (*item.encoding.segments, len(item.token_ids))


def _stop(item: Missing) -> int:
    return len(item.encoding.behind) + len(item.token_ids)
