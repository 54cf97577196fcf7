"""Selection by what was stored with the chunks, without a pass of the question (our own)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ragcachekit.model.kv import SENSITIVITY
from ragcachekit.policies.base import PlacedChunk, RatioPolicy, open_positions, share, top

FIRST = 2
"""First tokens of every chunk that are always chosen."""


@dataclass(frozen=True)
class Sensitive(RatioPolicy):
    """Recomputes the share ``ratio`` of cached tokens whose values depend most on what precedes their chunk.

    A token's sensitivity is the norm of the difference of its values between encodings of its chunk, summed
    over layers (``average:n``, ``similar:n``). The first :data:`FIRST` tokens of every chunk come first.
    A chunk without sensitivity, of which one encoding is known, gets the same share of its first tokens.
    """

    kind = "sensitive"

    def select(self, chunks: Sequence[PlacedChunk]) -> list[int]:
        """First tokens, then the most sensitive, within the share of all open positions."""
        opened = [chunk for chunk in chunks if not chunk.is_exact]
        known = [chunk for chunk in opened if SENSITIVITY in chunk.sums]
        chosen = [
            position
            for chunk in opened
            if SENSITIVITY not in chunk.sums
            for position in range(chunk.start, chunk.start + share(self.ratio, chunk.tokens))
        ]
        positions = open_positions(known)
        count = share(self.ratio, len(positions))
        first = [p for c in known for p in range(c.start, min(c.stop, c.start + FIRST))][:count]
        if not count:
            return chosen
        scores = torch.cat([chunk.sums[SENSITIVITY].sum(0) for chunk in known])
        taken = set(first)
        rest = [number for number, position in enumerate(positions) if position not in taken]
        return chosen + first + top([positions[n] for n in rest], scores[rest], count - len(first))
