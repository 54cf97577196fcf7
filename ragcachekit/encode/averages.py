"""The encoder ``average:n``: the mean of a chunk's KV behind one, two, ... n other chunks.

Our own (docs/encoders.md). What precedes a chunk in the next prompt is not known; the mean over likely
contexts is nearer to the KV that the chunk will have there than any one of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import groupby

import torch

from ragcachekit.encode.in_prompt import InPromptEncoder
from ragcachekit.model.encoding import AverageEncoding, InPromptEncoding
from ragcachekit.model.kv import SENSITIVITY, ChunkKV
from ragcachekit.plan.link_plan import Missing
from ragcachekit.types import Ids


class AverageEncoder:
    """Encodes a chunk behind every context of its :class:`AverageEncoding`, and takes the mean.

    Chunks that stand behind each other share forwards: four chunks take four, one per rotation.
    """

    def __init__(self, in_prompts: InPromptEncoder) -> None:
        self._in_prompts = in_prompts

    def encode(
        self, items: Iterable[Missing], plain: Iterable[Missing] = ()
    ) -> Iterator[tuple[Missing, ChunkKV]]:
        """Yield every item with its KV, keys without RoPE, and the ``sensitivity`` of its tokens.

        ``plain`` are the same chunks behind the system text alone, as :func:`takes_along` found them.
        """
        alone = {(item.token_ids, item.encoding.behind): item for item in plain}
        for _, block in groupby(items, _block_of):
            yield from self._together({item.token_ids: item for item in block}, alone)

    def _together(
        self, items: dict[Ids, Missing], alone: dict[tuple[Ids, Ids], Missing]
    ) -> Iterator[tuple[Missing, ChunkKV]]:
        means = {ids: _Mean() for ids in items}
        samples = (
            _behind(item, group)
            for (ids, item) in items.items()
            for group in _groups(item, (ids, item.encoding.behind) in alone)
        )

        def is_plain(sample: Missing) -> bool:
            return sample.encoding.behind == items[sample.token_ids].encoding.behind

        for sample, kv in self._in_prompts.encode(samples, summed=is_plain):
            own = items[sample.token_ids]
            if is_plain(sample):
                plain = alone.pop((own.token_ids, own.encoding.behind), None)
                if plain is not None:
                    yield plain, replace(kv, sums={"attended": kv.sums["attended"]})
                if () not in _encoding(own).groups:
                    continue
            means[sample.token_ids].add(kv)
        for ids, item in items.items():
            yield item, means.pop(ids).result()


def takes_along(items: Iterable[Missing], plain: Iterable[Missing]) -> list[Missing]:
    """Those of ``plain`` that the forwards for ``items`` compute as well: each chunk stands first in one."""
    firsts = {(item.token_ids, item.encoding.behind) for item in items}
    return [item for item in plain if (item.token_ids, item.encoding.behind) in firsts]


class _Mean:
    """Running means of the encodings of one chunk, in float32 (Welford's method)."""

    def __init__(self) -> None:
        self._count = 0

    def add(self, kv: ChunkKV) -> None:
        # Copied: the means are updated in place, and the store may have the KV as another entry.
        sides = [[t.to(torch.float32, copy=True) for t in side] for side in (kv.keys, kv.values)]
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


def _block_of(item: Missing) -> tuple[Ids, frozenset[Ids]]:
    """The system text, and all chunks of its contexts and itself."""
    return item.encoding.behind, frozenset((item.token_ids, *_encoding(item).neighbours))


def _groups(item: Missing, is_plain: bool) -> Iterable[tuple[Ids, ...]]:
    """The groups of chunks to encode it behind; ``is_plain``: behind none as well."""
    groups = _encoding(item).groups
    return dict.fromkeys(((), *groups)) if is_plain else groups


def _behind(item: Missing, group: tuple[Ids, ...]) -> Missing:
    """The item as the forward of a prompt computes it after these chunks."""
    encoding = _encoding(item)
    lengths = [len(ids) + len(encoding.joint) for ids in group]
    lengths = [len(encoding.behind), *lengths] if encoding.behind else lengths
    rows = InPromptEncoding(encoding.name, encoding.context(group), segments=tuple(lengths))
    return Missing(item.key, item.token_ids, rows)


def _encoding(item: Missing) -> AverageEncoding:
    assert isinstance(item.encoding, AverageEncoding)
    return item.encoding
