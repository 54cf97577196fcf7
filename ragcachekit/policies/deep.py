"""Query-guided selection over all layers, with every chunk's first token (our own; see docs/selection.md)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ragcachekit.policies.base import Look, PlacedChunk, RatioPolicy, open_positions, share, top


@dataclass(frozen=True)
class Deep(RatioPolicy):
    """Recomputes the share ``ratio`` of cached tokens that the question's rows attend to in any layer.

    Differs from :class:`~ragcachekit.policies.query.Query` in three ways. All layers count. Each layer's sums
    are scaled to a total of 1 and added as square roots, so that no layer or token decides alone. The first
    token of every chunk comes first, as an attention sink encoded at position 0 misleads every later token.
    """

    kind = "deep"
    look = Look(layers=None)

    def choose(self, chunks: Sequence[PlacedChunk], attention: Sequence[torch.Tensor]) -> list[int]:
        """First tokens, then the highest scores, within the share of all open positions."""
        positions = open_positions(chunks)
        count = share(self.ratio, len(positions))
        first = [chunk.start for chunk in chunks if not chunk.is_exact][:count]
        rest = sorted(set(positions) - set(first))
        sums = torch.stack(tuple(attention))[:, positions]
        # A sliding window may hide all chunks from the question in a layer, whose sums are then 0.
        scores = (sums / sums.sum(1, keepdim=True).clamp_min(1e-30)).sqrt().sum(0)
        at = {p: i for i, p in enumerate(positions)}
        return first + top(rest, scores[[at[p] for p in rest]], count - len(first))
