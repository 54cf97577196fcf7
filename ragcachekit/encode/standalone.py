"""Chunk encoder: prefills chunks once and returns their KV without RoPE."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from transformers import Cache, DynamicCache

from ragcachekit.model.encoding import Encoding
from ragcachekit.model.kv import ChunkKV, Stretch, extract
from ragcachekit.model.rope import Rope
from ragcachekit.types import ENCODING_PREFIX

BATCH_TOKENS = 2048
"""Maximal padded tokens of one batch: enough to fill a matmul."""

BATCH_BYTES = 64 << 20
"""Maximal KV of one batch, in bytes; a single chunk may exceed it."""


class ChunkEncoder:
    """Runs chunks through the decoder of a causal LM, batched over unequal lengths.

    ``new_cache`` makes a batch's cache from each item's ``(start, stop)``, the rows of its chunk. The cache's
    ``sums`` (a mapping per item), if any, become those of the KV.
    """

    def __init__(
        self,
        model: Any,
        rope: Rope,
        new_cache: Callable[[Sequence[tuple[int, int]]], Cache] = lambda _: DynamicCache(),
    ) -> None:
        self._model = model
        self._rope = rope
        self._new_cache = new_cache
        self._token_bytes = 0  # KV of one token; 0 before the first batch

    def encode(self, chunks: Sequence[Sequence[int]], encoding: Encoding) -> Iterator[tuple[int, ChunkKV]]:
        """Yield ``(index, ChunkKV)`` for every chunk, the shortest last; ValueError for an empty chunk.

        Batches are limited by :data:`BATCH_TOKENS` and :data:`BATCH_BYTES`. A chunk's KV is released when
        the next one is requested.
        """
        if any(len(chunk) == 0 for chunk in chunks):
            raise ValueError("an empty chunk has no KV; drop it before encoding")
        order = sorted(range(len(chunks)), key=lambda i: len(chunks[i]))
        while order:
            batch = self._take(order, chunks, len(encoding.before))
            kvs = self._forward([chunks[i] for i in batch], encoding)[::-1]
            self._token_bytes = -(-kvs[-1].nbytes // kvs[-1].tokens)
            for index in batch:
                yield index, kvs.pop()

    def _take(self, order: list[int], chunks: Sequence[Sequence[int]], before: int) -> list[int]:
        """Move the longest chunks that fit one batch out of ``order``; the first batch is a single chunk."""
        width = before + len(chunks[order[-1]])
        most = min(BATCH_TOKENS, BATCH_BYTES // self._token_bytes) if self._token_bytes else 0
        count = max(1, min(len(order), most // width))
        batch = order[-count:]
        del order[-count:]
        return batch[::-1]

    @torch.no_grad()
    def _forward(self, chunks: Sequence[Sequence[int]], encoding: Encoding) -> list[ChunkKV]:
        before = len(encoding.before)
        spans = [(before, before + len(chunk)) for chunk in chunks]
        cache = self._new_cache(spans)
        prompts = [(*encoding.before, *chunk) for chunk in chunks]
        length = prefill(self._model, prompts, encoding.length, cache)
        exact = encoding.name == ENCODING_PREFIX
        stretches = [Stretch(row, *span) for row, span in enumerate(spans)]
        sides = extract(cache.layers, stretches, None if exact else self._rope, length)
        sums = getattr(cache, "sums", None) or [{} for _ in chunks]
        return [ChunkKV(*kv, 0 if exact else None, s) for kv, s in zip(sides, sums, strict=True)]


def prefill(model: Any, prompts: Sequence[Sequence[int]], length: int, cache: Cache) -> int:
    """Run right-padded prompts through the decoder into ``cache``, with the frequencies of ``length`` tokens.

    Returns that length, at least the longest prompt's. Padding needs no mask: under causal attention later
    tokens do not change earlier ones.
    """
    width = max(map(len, prompts))
    length = max(length, width)
    # One more token at the last position makes the model use the frequencies of the longer prompt.
    last = [length - 1] if length > width else []
    ids = torch.zeros(len(prompts), width + len(last), dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(prompt)
    positions = torch.tensor([*range(width), *last])
    model.base_model(
        input_ids=ids.to(model.device),
        position_ids=positions.expand(len(prompts), -1).to(model.device),
        past_key_values=cache,
        use_cache=True,
    )
    return length
