"""Selection by how much tokens depend on context, as stored with the chunks (our own; docs/selection.md)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ragcachekit.model.kv import ASKED, SENSITIVITY
from ragcachekit.policies.base import (
    Look,
    PlacedChunk,
    RatioPolicy,
    first_then_top,
    open_positions,
    share,
    top,
)

FIRST = 2
"""First tokens of every chunk that are always chosen."""

FULL_SHARE = 512
"""Open tokens up to which the share is as given; beyond, the rows grow as the fourth root of the tokens."""

ROWS = 32
"""Last rows of the question that count: they precede the answer; examples before them mislead."""


@dataclass(frozen=True)
class Sensitive(RatioPolicy):
    """Recomputes the share ``ratio`` of cached tokens that depend on context and that questions look at.

    A token's score is its sensitivity, the norm of the difference of its values between encodings of its
    chunk, times the square root of the attention that it got from questions while the chunk was encoded,
    summed over layers (``average:n``). Where one of them is not stored the other decides. The first
    :data:`FIRST` tokens of every chunk come first. A chunk with neither gets the same share of its first
    tokens.

    Of more than :data:`FULL_SHARE` tokens it recomputes a smaller share: a row costs more there, as it
    attends to all before it, and about as many rows win back as much (docs/selection.md).
    """

    kind = "sensitive"
    corrects = True

    def select(self, chunks: Sequence[PlacedChunk]) -> list[int]:
        """First tokens, then the highest scores, within the share of all open positions."""
        opened = [chunk for chunk in chunks if not chunk.is_exact]
        ratio = self._share_of(sum(chunk.tokens for chunk in opened))
        known = [chunk for chunk in opened if SENSITIVITY in chunk.sums or ASKED in chunk.sums]
        chosen = [
            position
            for chunk in opened
            if SENSITIVITY not in chunk.sums and ASKED not in chunk.sums
            for position in range(chunk.start, chunk.start + share(ratio, chunk.tokens))
        ]
        positions = open_positions(known)
        count = share(ratio, len(positions))
        first = [p for c in known for p in range(c.start, min(c.stop, c.start + FIRST))][:count]
        if not count:
            return chosen
        scores, taken = torch.cat(_scores(known)), set(first)
        rest = [number for number, position in enumerate(positions) if position not in taken]
        return chosen + first + top([positions[n] for n in rest], scores[rest], count - len(first))

    def _share_of(self, tokens: int) -> float:
        """The share of so many open tokens; 1 recomputes all of them at any length."""
        if tokens <= FULL_SHARE or self.ratio == 1.0:
            return self.ratio
        return self.ratio * math.pow(FULL_SHARE / tokens, 0.75)


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
        opened = [chunk for chunk in chunks if not chunk.is_exact]
        if not opened:
            return []
        weights = torch.stack(tuple(attention))[:, open_positions(chunks)]
        weights = weights * torch.cat(_sensitivities(opened, len(attention)), dim=1)
        return first_then_top(chunks, weights.sum(0), self.ratio)


def _scores(chunks: Sequence[PlacedChunk]) -> list[Tensor]:
    """``[tokens]`` of each chunk."""
    out = []
    for chunk, sensitivity in zip(chunks, _sensitivities(chunks), strict=True):
        asked = chunk.sums.get(ASKED)
        # Questions differ from chunk to chunk: only what is within a chunk is compared.
        # Layers that share KV attend as well; beyond a sliding window nothing is seen.
        if asked is None or len(sensitivity) not in (1, len(asked)) or not asked.any():
            asked = torch.ones(1, chunk.tokens)
        weight = (asked / asked.mean()).sqrt()
        out.append((sensitivity * weight).sum(0))
    return out


def _sensitivities(chunks: Sequence[PlacedChunk], layers: int | None = None) -> list[Tensor]:
    """``[layers, tokens]`` of each chunk; the mean of the others where it is not stored, 1 without any."""
    found = [chunk.sums.get(SENSITIVITY) for chunk in chunks]
    known = [sums for sums in found if sums is not None and layers in (None, len(sums))]
    mean = torch.cat(known, dim=1).mean(1, keepdim=True) if known else torch.ones(layers or 1, 1)
    return [
        sums if sums is not None and layers in (None, len(sums)) else mean.expand(-1, chunk.tokens)
        for chunk, sums in zip(chunks, found, strict=True)
    ]
