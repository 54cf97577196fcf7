"""The encoder ``average:n``: the mean of a chunk's KV behind one, two, ... n other chunks.

Our own (docs/encoders.md). What precedes a chunk in the next prompt is not known; the mean over likely
contexts is nearer to the KV that the chunk will have there than any one of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

import torch

from ragcachekit.encode.in_prompt import InPromptEncoder
from ragcachekit.model.encoding import AverageEncoding, Ids, InPromptEncoding
from ragcachekit.model.kv import SENSITIVITY, ChunkKV
from ragcachekit.plan.link_plan import Missing


class AverageEncoder:
    """Encodes a chunk behind every context of its :class:`AverageEncoding`, and takes the mean.

    Chunks that stand behind each other share forwards: four chunks take four, one per rotation.
    """

    def __init__(self, in_prompts: InPromptEncoder) -> None:
        self._in_prompts = in_prompts

    def encode(self, items: Iterable[Missing]) -> Iterator[tuple[Missing, ChunkKV]]:
        """Yield every item with its KV, keys without RoPE, and the ``sensitivity`` of its tokens."""
        for _, block in groupby(items, _chunks_of):
            yield from self._together({item.token_ids: item for item in block})

    def _together(self, items: dict[Ids, Missing]) -> Iterator[tuple[Missing, ChunkKV]]:
        means = {ids: _Mean() for ids in items}
        samples = [sample for item in items.values() for sample in _samples(item)]
        for sample, kv in self._in_prompts.encode(samples):
            means[sample.token_ids].add(kv)
        for ids, item in items.items():
            yield item, means.pop(ids).result()


class _Mean:
    """Running means of the encodings of one chunk, in float32 (Welford's method)."""

    def __init__(self) -> None:
        self._count = 0

    def add(self, kv: ChunkKV) -> None:
        sides = [[tensor.float() for tensor in side] for side in (kv.keys, kv.values)]
        if not self._count:
            self._dtypes = [[tensor.dtype for tensor in side] for side in (kv.keys, kv.values)]
            self._means = sides
            self._squares = [torch.zeros(kv.tokens) for _ in kv.keys]
        self._count += 1
        for mean, new in zip(self._means[0], sides[0], strict=True):
            mean += (new - mean) / self._count
        for layer, (mean, new) in enumerate(zip(self._means[1], sides[1], strict=True)):
            moved = new - mean
            mean += moved / self._count
            self._squares[layer] += (moved * (new - mean)).sum((0, 2))

    def result(self) -> ChunkKV:
        keys, values = (
            tuple(tensor.to(dtype) for tensor, dtype in zip(side, dtypes, strict=True))
            for side, dtypes in zip(self._means, self._dtypes, strict=True)
        )
        # Twice the variance: the mean square of the difference between two contexts.
        moved = (2 / (self._count - 1) * torch.stack(self._squares).clamp_min(0)).sqrt()
        return ChunkKV(keys, values, None, {SENSITIVITY: moved})


def _chunks_of(item: Missing) -> frozenset[Ids]:
    """All chunks of its contexts and itself."""
    return frozenset((item.token_ids, *_encoding(item).neighbours))


def _samples(item: Missing) -> Iterator[Missing]:
    """The item behind each of its contexts in turn."""
    encoding = _encoding(item)
    start = [len(encoding.behind)] if encoding.behind else []
    for group in encoding.groups:
        lengths = (*start, *(len(ids) + len(encoding.joint) for ids in group))
        behind = InPromptEncoding(encoding.name, encoding.context(group), segments=lengths)
        yield Missing(item.key, item.token_ids, behind)


def _encoding(item: Missing) -> AverageEncoding:
    assert isinstance(item.encoding, AverageEncoding)
    return item.encoding
