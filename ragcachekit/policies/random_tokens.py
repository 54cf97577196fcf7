"""Random tokens: the control that every other policy has to beat."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from ragcachekit.policies.base import PlacedChunk, RatioPolicy, share


@dataclass(frozen=True)
class Random(RatioPolicy):
    """Recomputes in every chunk a random share ``ratio`` of its tokens, drawn from the chunk's id."""

    kind = "random"

    def select(self, chunks: Sequence[PlacedChunk]) -> list[int]:
        """The same tokens of a chunk at every use."""
        return [p for chunk in chunks if not chunk.is_exact for p in self._of(chunk)]

    def _of(self, chunk: PlacedChunk) -> list[int]:
        positions = range(chunk.start, chunk.stop)
        return random.Random(chunk.chunk_id).sample(positions, share(self.ratio, chunk.tokens))
