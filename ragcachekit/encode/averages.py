"""The encoder ``average:n``: the mean of a chunk's KV behind several groups of other chunks.

Our own (docs/encoders.md). What precedes a chunk in the next prompt is not known; the mean over likely
contexts is nearer to the KV that the chunk will have there than any one of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from ragcachekit.encode.standalone import ChunkEncoder
from ragcachekit.model.encoding import AverageEncoding, Encoding
from ragcachekit.model.kv import SENSITIVITY, ChunkKV
from ragcachekit.plan.link_plan import Missing


class AverageEncoder:
    """Encodes a chunk behind every context of its :class:`AverageEncoding`, and takes the mean."""

    def __init__(self, encoder: ChunkEncoder) -> None:
        self._encoder = encoder

    def encode(self, items: Iterable[Missing]) -> Iterator[tuple[Missing, ChunkKV]]:
        """Yield every item with its KV, keys without RoPE, and the ``sensitivity`` of its tokens."""
        for item in items:
            encoding = item.encoding
            assert isinstance(encoding, AverageEncoding)
            contexts = encoding.contexts
            if len(contexts) == 1:  # one encoding says nothing about the spread: compare with none before it
                contexts = (*contexts, encoding.behind)
            kvs = [self._behind(item, context) for context in contexts]
            moved = spread([kv.values for kv in kvs])
            yield item, mean(kvs[: len(encoding.contexts)], moved)

    def _behind(self, item: Missing, context: tuple[int, ...]) -> ChunkKV:
        ((_, kv),) = self._encoder.encode([item.token_ids], Encoding(item.encoding.name, context))
        return kv.to("cpu")


def mean(kvs: Sequence[ChunkKV], sensitivity: torch.Tensor) -> ChunkKV:
    """The mean of a chunk's encodings and of their sums, taken in float32, with these sensitivities."""

    def of(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
        first, *others = tensors
        stacked = torch.stack([tensor.float() for tensor in (first, *others)])
        return stacked.mean(0).to(first.dtype) if others else first

    keys = tuple(of(layer) for layer in zip(*(kv.keys for kv in kvs), strict=True))
    values = tuple(of(layer) for layer in zip(*(kv.values for kv in kvs), strict=True))
    sums = {name: of(kv.sums[name] for kv in kvs) for name in kvs[0].sums}
    return ChunkKV(keys, values, None, {**sums, SENSITIVITY: sensitivity})


def spread(values: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
    """How far each token's values move between encodings of a chunk: ``[layers, tokens]`` float32.

    ``values`` are, per encoding and layer, ``[kv_heads, tokens, head_dim]``; at least two encodings. Of two
    it is the norm of their difference over heads and dimensions; of more, the root of its mean square over
    pairs.
    """
    layers = (torch.stack([one.float() for one in layer]) for layer in zip(*values, strict=True))
    return torch.stack([(2 * layer.var(0)).sum((0, 2)).sqrt() for layer in layers])
