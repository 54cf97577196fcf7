"""The encoder ``in-prompt``: chunks behind what really stood before them (Cache-Craft section 3.1)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from transformers import DynamicCache

from ragcachekit.encode.standalone import prefill
from ragcachekit.forward.attention_sums import ContextSums, SummingCache
from ragcachekit.forward.own_rows import segments_of, stop_of
from ragcachekit.model.extract import Stretch, extract
from ragcachekit.model.kv import ChunkKV
from ragcachekit.model.rope.rotation import Rope
from ragcachekit.plan.link_plan import Missing


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
        self._model = model
        self._rope = rope

    def encode(
        self, items: Iterable[Missing], summed: Callable[[Missing], bool] = lambda _: True
    ) -> Iterator[tuple[Missing, ChunkKV]]:
        """Yield every item of an :class:`InPromptEncoding` with its KV, keys without RoPE, on the host.

        Attention is summed for those that are ``summed``; on a CPU that takes as long as the forward.
        """
        for run in runs(items):
            kvs = self._forward(run, [item for item in run if summed(item)])[::-1]
            for item in run:
                yield item, kvs.pop()  # what was stored is released

    @torch.no_grad()
    def _forward(self, run: Sequence[Missing], summed: Sequence[Missing]) -> list[ChunkKV]:
        sums = ContextSums([segments_of(item) for item in summed])
        cache = SummingCache(sums) if summed else DynamicCache()
        encoding = run[0].encoding
        length = prefill(self._model, [(*encoding.behind, *run[0].token_ids)], encoding.length, cache)
        stretches = [Stretch(0, len(item.encoding.behind), stop_of(item)) for item in run]
        sides = extract(cache.layers, stretches, self._rope, length)
        found = dict(zip(map(id, summed), sums.sums if summed else (), strict=True))
        return [ChunkKV(*kv, None, found.get(id(item), {})) for kv, item in zip(sides, run, strict=True)]


def _serves(first: Missing, item: Missing) -> bool:
    """Whether a forward of ``first`` passes through all of ``item``, under the same frequencies."""
    one, other = first.key, item.key
    if (one.fingerprint, one.namespace, one.encoding) != (other.fingerprint, other.namespace, other.encoding):
        return False
    whole = (*first.encoding.behind, *first.token_ids)
    return whole[: stop_of(item)] == (*item.encoding.behind, *item.token_ids)
