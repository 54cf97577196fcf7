"""Selection by what was stored with the chunks, without a pass of the question (our own)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ragcachekit.model.kv import ASKED, SENSITIVITY
from ragcachekit.policies.base import PlacedChunk, RatioPolicy, open_positions, share, top

FIRST = 2
"""First tokens of every chunk that are always chosen."""

FULL_SHARE = 512
"""Open tokens up to which the share is as given; beyond, the rows grow as the fourth root of the tokens."""


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


def _scores(chunks: Sequence[PlacedChunk]) -> list[Tensor]:
    """``[tokens]`` of each chunk; sensitivities that are not stored count as the mean of the others."""
    found = [chunk.sums[SENSITIVITY] for chunk in chunks if SENSITIVITY in chunk.sums]
    mean = torch.cat(found, dim=1).mean(1, keepdim=True) if found else torch.ones(1)
    out = []
    for chunk in chunks:
        sensitivity, asked = chunk.sums.get(SENSITIVITY, mean), chunk.sums.get(ASKED)
        # Questions differ from chunk to chunk: only what is within a chunk is compared.
        # Layers that share KV attend as well; beyond a sliding window nothing is seen.
        if asked is None or len(sensitivity) not in (1, len(asked)) or not asked.any():
            asked = torch.ones(1, chunk.tokens)
        weight = (asked / asked.mean()).sqrt()
        out.append((sensitivity * weight).sum(0))
    return out
