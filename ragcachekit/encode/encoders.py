"""Encoders of chunks: alone or after a fixed text, and ``similar:n`` after other chunks' KV."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from transformers import Cache, DynamicCache

from ragcachekit.forward.linker import link
from ragcachekit.model.encoding import AverageEncoding, Encoding, NeighbourEncoding
from ragcachekit.model.kv import SENSITIVITY, ChunkKV, KVLayout, Stretch, decoder_of, extract
from ragcachekit.model.rope import Rope
from ragcachekit.plan.encodings import Fetch, system_encoding
from ragcachekit.plan.link_plan import LinkPlan, Missing, Piece
from ragcachekit.reports import LinkReport
from ragcachekit.store.base import KVStore
from ragcachekit.types import ENCODING_PREFIX, KVKey, chunk_id

BATCH_TOKENS = 2048
"""Maximal padded tokens of one batch: enough to fill a matmul."""

BATCH_BYTES = 64 << 20
"""Maximal KV of one batch, in bytes; a single chunk may exceed it."""


class ChunkEncoder:
    """Runs chunks through the decoder of a causal LM, batched over unequal lengths, or each ``alone``."""

    def __init__(self, model: Any, rope: Rope, alone: bool = False) -> None:
        self._model, self._rope, self._alone = model, rope, alone
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
            kvs = self.forward([chunks[i] for i in batch], encoding)[::-1]
            self._token_bytes = -(-kvs[-1].nbytes // kvs[-1].tokens)
            for index in batch:
                yield index, kvs.pop()

    def _take(self, order: list[int], chunks: Sequence[Sequence[int]], before: int) -> list[int]:
        """Move the longest chunks that fit one batch out of ``order``; the first batch is a single chunk."""
        width = before + len(chunks[order[-1]])
        most = 0
        if self._token_bytes and not self._alone:
            most = min(BATCH_TOKENS, BATCH_BYTES // self._token_bytes)
        count = max(1, min(len(order), most // width))
        batch = order[-count:]
        del order[-count:]
        return batch[::-1]

    @torch.no_grad()
    def forward(self, chunks: Sequence[Sequence[int]], encoding: Encoding) -> list[ChunkKV]:
        """Run the model over the encoding's text and each chunk, as one batch; one KV per chunk."""
        before = len(encoding.before)
        spans = [(before, before + len(chunk)) for chunk in chunks]
        cache = DynamicCache()
        prompts = [(*encoding.before, *chunk) for chunk in chunks]
        length = prefill(self._model, prompts, encoding.length, cache)
        exact = encoding.name == ENCODING_PREFIX
        stretches = [Stretch(row, *span) for row, span in enumerate(spans)]
        sides = extract(cache.layers, stretches, None if exact else self._rope, length)
        return [ChunkKV(*kv, 0 if exact else None) for kv in sides]


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
    decoder_of(model)(
        input_ids=ids.to(model.device),
        position_ids=positions.expand(len(prompts), -1).to(model.device),
        past_key_values=cache,
        use_cache=True,
    )
    return length


def ingredients(item: Missing) -> list[tuple[int, Missing]]:
    """Start positions and entries of the context that ``item`` is encoded after.

    These are the system text as ``prefix``, then each neighbour after that text alone, as ``system``
    (without a text: ``standalone``). Empty for encodings other than ``similar:n``.
    """
    encoding = item.encoding
    if not isinstance(encoding, NeighbourEncoding):
        return []
    system, out, at = encoding.before, [], 0
    if system:
        out.append((0, _entry(item, system, Encoding(ENCODING_PREFIX))))
        at = len(system)
    for ids in encoding.neighbours:
        out.append((at, alone(item, ids)))
        at += len(ids)
    return out


def with_ingredients(missing: Iterable[Missing], store: KVStore) -> list[Missing]:
    """``missing`` after the entries that go with it and that ``store`` lacks, each once.

    Of ``similar:n`` these are its context; of ``average:n`` the chunk after the system text alone, where that
    is known: it is exact where the chunk is a prompt's first.
    """
    missing = list(missing)
    needed = {part.key: part for item in missing for _, part in ingredients(item)}
    means = (one for one in missing if isinstance(one.encoding, AverageEncoding) and one.encoding.before)
    needed |= {part.key: part for part in (alone(item, item.token_ids) for item in means)}
    absent = {key: part for key, part in needed.items() if key not in store}
    return list((absent | {item.key: item for item in missing}).values())


class NeighbourEncoder:
    """Encodes chunks after the KV of a system text and of other chunks.

    The neighbours do not attend to each other: each is its own ``system`` encoding, rotated to its place.
    The chunk's rows run in one linked forward over them. Neighbours that ``store`` lacks are encoded for
    this use and not stored.
    """

    def __init__(
        self, model: Any, rope: Rope, encoder: ChunkEncoder, store: KVStore, layout: KVLayout | None = None
    ) -> None:
        self._model, self._rope, self._encoder = model, rope, encoder
        self._store, self._layout = store, layout

    def encode(self, items: Iterable[Missing]) -> Iterator[tuple[Missing, ChunkKV]]:
        """Yield every item of a :class:`NeighbourEncoding` with its KV, keys without RoPE, on the host."""
        for item in items:
            yield item, self.forward(item, [Piece(at, self._kv(part)) for at, part in ingredients(item)])

    def _kv(self, part: Missing) -> ChunkKV:
        found = Fetch(self._store, layout=self._layout).get(part.key, len(part.token_ids))
        if found is not None and isinstance(found.kv, ChunkKV):
            return found.kv
        ((_, kv),) = self._encoder.encode([part.token_ids], part.encoding)
        return kv

    @torch.no_grad()
    def forward(self, item: Missing, pieces: list[Piece]) -> ChunkKV:
        """Run the model over a chunk that follows others, whose own KV is linked."""
        assert isinstance(item.encoding, NeighbourEncoding)
        before = tuple(token for _, part in ingredients(item) for token in part.token_ids)
        ids = (*before, *item.encoding.joint, *item.token_ids)
        rows, start = range(len(before), len(ids)), len(ids) - len(item.token_ids)
        report = LinkReport("reuse", item.encoding.name, item.key.namespace, len(ids))
        plan = LinkPlan(ids, tuple(pieces), tuple(rows), (), report)
        inputs = link(plan, self._rope, self._model.device)
        inputs.run(self._model, len(rows))
        (kv,) = extract(inputs.cache.layers, [Stretch(0, start, len(ids))], self._rope, len(ids))
        own = self._kv(alone(item, item.token_ids)).to("cpu")
        # How far each token's values moved from those after the system text alone, over heads and dimensions.
        moved = [
            (a.float() - b.float()).square().sum((0, 2)).sqrt()
            for a, b in zip(kv[1], own.values, strict=True)
        ]
        return ChunkKV(*kv, None, {SENSITIVITY: torch.stack(moved)})


def alone(item: Missing, ids: tuple[int, ...]) -> Missing:
    """A chunk after the system text of ``item`` alone, or after nothing."""
    return _entry(item, ids, system_encoding(item.encoding.before))


def _entry(item: Missing, ids: tuple[int, ...], encoding: Encoding) -> Missing:
    """An entry of the same model, namespace and epoch as ``item``."""
    key = item.key
    context = (chunk_id(encoding.before, key.namespace),) if encoding.before else ()
    own = KVKey(key.fingerprint, key.namespace, chunk_id(ids, key.namespace), encoding.name, context)
    return Missing(own, ids, encoding, item.epoch)
