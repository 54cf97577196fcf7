"""The encoder ``in-prompt``: chunks behind what really stood before them (Cache-Craft section 3.1)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

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

    def encode(self, items: Iterable[Missing]) -> Iterator[tuple[Missing, ChunkKV]]:
        """Yield every item of an :class:`InPromptEncoding` with its KV, keys without RoPE, on the host."""
        for run in runs(items):
            kvs = self._forward(run)[::-1]
            for item in run:
                yield item, kvs.pop()  # what was stored is released

    @torch.no_grad()
    def _forward(self, run: Sequence[Missing]) -> list[ChunkKV]:
        sums = ContextSums([segments_of(item) for item in run])
        cache = SummingCache(sums)
        encoding = run[0].encoding
        length = prefill(self._model, [(*encoding.behind, *run[0].token_ids)], encoding.length, cache)
        stretches = [Stretch(0, len(item.encoding.behind), stop_of(item)) for item in run]
        sides = extract(cache.layers, stretches, self._rope, length)
        return [ChunkKV(*kv, None, s) for kv, s in zip(sides, sums.sums, strict=True)]


def _serves(first: Missing, item: Missing) -> bool:
    """Whether a forward of ``first`` passes through all of ``item``, under the same frequencies."""
    one, other = first.key, item.key
    if (one.fingerprint, one.namespace, one.encoding) != (other.fingerprint, other.namespace, other.encoding):
        return False
    whole = (*first.encoding.behind, *first.token_ids)
    return whole[: stop_of(item)] == (*item.encoding.behind, *item.token_ids)
