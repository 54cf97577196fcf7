"""Selection by what reuse can do to the answer: attention times sensitivity (our own; docs/selection.md)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ragcachekit.model.kv import SENSITIVITY
from ragcachekit.policies.base import Look, PlacedChunk, RatioPolicy, first_then_top, open_positions

ROWS = 32
"""Last rows of the question that count: they precede the answer; examples before them mislead."""


@dataclass(frozen=True)
class TokenImpact(RatioPolicy):
    """Recomputes the share ``ratio`` of cached tokens with the highest impact on the answer.

    A token's impact is its attention from the last :data:`ROWS` rows of the question, under one softmax over
    all keys, times its sensitivity, summed over layers. The sensitivity is the norm of the difference of its
    values between encodings of its chunk (``average:n``, ``similar:n``). Tokens of chunks without it count as
    the mean of the others in each layer; without any, attention alone counts. The first token of every chunk
    comes first, as in :class:`~ragcachekit.policies.attention.Deep`.
    """

    kind = "impact"
    corrects = True
    look = Look(layers=None, per_chunk=False, last=ROWS)

    def choose(self, chunks: Sequence[PlacedChunk], attention: Sequence[Tensor]) -> list[int]:
        """First tokens, then the highest impact, within the share of all open positions."""
        weights = torch.stack(tuple(attention))[:, open_positions(chunks)]
        weights = weights * _sensitivities([chunk for chunk in chunks if not chunk.is_exact], len(attention))
        return first_then_top(chunks, weights.sum(0), self.ratio)


def _sensitivities(chunks: Sequence[PlacedChunk], layers: int) -> Tensor:
    """``[layers, tokens]`` of all ``chunks``; 1 if none of them has any."""
    found = [chunk.sums.get(SENSITIVITY) for chunk in chunks]
    known = [sums for sums in found if sums is not None and len(sums) == layers]
    if not known:
        return torch.ones(layers, sum(chunk.tokens for chunk in chunks))
    mean = torch.cat(known, dim=1).mean(1, keepdim=True)
    filled = (
        sums if sums is not None and len(sums) == layers else mean.expand(-1, chunk.tokens)
        for chunk, sums in zip(chunks, found, strict=True)
    )
    return torch.cat(list(filled), dim=1)
