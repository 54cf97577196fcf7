"""Query-guided selection (FusionRAG section 3.2): the tokens that the question attends to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ragcachekit.policies.base import Look, PlacedChunk, check_ratio, open_positions, share, top


@dataclass(frozen=True)
class Query:
    """Recomputes the share ``ratio`` of cached tokens that the question's rows attend to most.

    The question runs over the linked cache; in the last layer every row's softmax goes over each chunk
    by itself, weights are summed over heads and rows, and the highest of all chunks together win.
    """

    ratio: float
    encoder: str | None = None
    reads_cache = True
    look = Look()

    def __post_init__(self) -> None:
        check_ratio("query", self.ratio)

    @property
    def name(self) -> str:
        """``query:r``."""
        return f"query:{self.ratio:g}"

    def select(self, chunks: Sequence[PlacedChunk]) -> list[int]:
        """Nothing: without a question there is no choice."""
        return []

    def choose(self, chunks: Sequence[PlacedChunk], attention: Sequence[torch.Tensor]) -> list[int]:
        """The top share of the open positions."""
        positions = open_positions(chunks)
        return top(positions, attention[0][positions], share(self.ratio, len(positions)))
