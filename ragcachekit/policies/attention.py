"""Tokens that the question attends to (``query``, ``deep``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ragcachekit.policies.base import (
    Look,
    PlacedChunk,
    RatioPolicy,
    first_then_top,
    open_positions,
    share,
    top,
)


@dataclass(frozen=True)
class Query(RatioPolicy):
    """Recomputes the share ``ratio`` of cached tokens that the question attends to (FusionRAG section 3.2).

    In the last layer each row of the question has one softmax per chunk; weights are summed over heads and
    rows, and the highest of all chunks together win.
    """

    kind = "query"
    look = Look()

    def choose(self, chunks: Sequence[PlacedChunk], attention: Sequence[Tensor]) -> list[int]:
        """The top share of the open positions."""
        positions = open_positions(chunks)
        return top(positions, attention[0][positions], share(self.ratio, len(positions)))


@dataclass(frozen=True)
class Deep(RatioPolicy):
    """Recomputes the share ``ratio`` of cached tokens that the question's rows attend to in any layer (ours).

    Differs from :class:`Query` in three ways. All layers count. Each layer's sums are scaled to a total of 1
    and added as square roots, so that no layer or token decides alone. The first token of every chunk comes
    first, as an attention sink encoded at position 0 misleads every later token.
    """

    kind = "deep"
    look = Look(layers=None)

    def choose(self, chunks: Sequence[PlacedChunk], attention: Sequence[Tensor]) -> list[int]:
        """First tokens, then the highest scores, within the share of all open positions."""
        sums = torch.stack(tuple(attention))[:, open_positions(chunks)]
        # A sliding window may hide all chunks from the question in a layer, whose sums are then 0.
        scores = (sums / sums.sum(1, keepdim=True).clamp_min(1e-30)).sqrt().sum(0)
        return first_then_top(chunks, scores, self.ratio)
