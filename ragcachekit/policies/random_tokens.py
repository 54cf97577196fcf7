"""Random tokens: the control that every other policy has to beat."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from ragcachekit.policies.base import PlacedChunk, check_ratio, share


@dataclass(frozen=True)
class Random:
    """Recomputes in every chunk a random share ``ratio`` of its tokens, drawn from the chunk's id."""

    ratio: float
    encoder: str | None = None
    reads_cache = True

    def __post_init__(self) -> None:
        check_ratio("random", self.ratio)

    @property
    def name(self) -> str:
        """``random:r``."""
        return f"random:{self.ratio:g}"

    def select(self, chunks: Sequence[PlacedChunk]) -> list[int]:
        """The same tokens of a chunk at every use."""
        return [
            p
            for chunk in chunks
            if not chunk.is_exact
            for p in random.Random(chunk.chunk_id).sample(
                range(chunk.start, chunk.stop), share(self.ratio, chunk.tokens)
            )
        ]
