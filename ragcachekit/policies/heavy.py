"""Heavy hitters: the tokens that got most attention while their chunk was encoded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ragcachekit.policies.base import PlacedChunk, RatioPolicy, share, top


@dataclass(frozen=True)
class Heavy(RatioPolicy):
    """Recomputes in every chunk the share ``ratio`` of its tokens that were attended to most.

    Causal sums favour early tokens, as those of H2O do. Without recorded sums the first tokens are taken.
    """

    kind = "heavy"

    def select(self, chunks: Sequence[PlacedChunk]) -> list[int]:
        """The top share of every chunk that is not exact."""
        return [p for chunk in chunks if not chunk.is_exact for p in self._of(chunk)]

    def _of(self, chunk: PlacedChunk) -> list[int]:
        sums = chunk.attended if chunk.attended is not None else -torch.arange(chunk.tokens)
        return top(range(chunk.start, chunk.stop), sums, share(self.ratio, chunk.tokens))
