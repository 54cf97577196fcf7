"""Tokens that attention ranks: the question's (``query``, ``deep``) or the chunk's own (``heavy``)."""

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


@dataclass(frozen=True)
class Heavy(RatioPolicy):
    """Recomputes in every chunk the share ``ratio`` of tokens that were attended to most when it was encoded.

    Causal sums favour early tokens, as those of H2O do. Without recorded sums, as
    in rows that prompts computed, the first tokens are taken.
    """

    kind = "heavy"

    def select(self, chunks: Sequence[PlacedChunk]) -> list[int]:
        """The top share of every chunk that is not exact."""
        out = []
        for chunk in chunks:
            sums = chunk.attended if chunk.attended is not None else -torch.arange(chunk.tokens)
            count = 0 if chunk.is_exact else share(self.ratio, chunk.tokens)
            out += top(range(chunk.start, chunk.stop), sums, count)
        return out
