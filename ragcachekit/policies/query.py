"""Query-guided selection (FusionRAG section 3.2): the tokens that the question attends to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ragcachekit.policies.base import Look, PlacedChunk, RatioPolicy, open_positions, share, top


@dataclass(frozen=True)
class Query(RatioPolicy):
    """Recomputes the share ``ratio`` of cached tokens that the question's rows attend to most.

    In the last layer each row has one softmax per chunk; weights are summed over heads and rows, and the
    highest of all chunks together win.
    """

    kind = "query"
    look = Look()

    def choose(self, chunks: Sequence[PlacedChunk], attention: Sequence[torch.Tensor]) -> list[int]:
        """The top share of the open positions."""
        positions = open_positions(chunks)
        return top(positions, attention[0][positions], share(self.ratio, len(positions)))
