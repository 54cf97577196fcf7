"""Query-guided selection over all layers, with every chunk's first token (our own; see docs/selection.md)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ragcachekit.policies.base import Look, PlacedChunk, check_ratio, open_positions, share, top


@dataclass(frozen=True)
class Deep:
    """Recomputes the share ``ratio`` of cached tokens that the question's rows attend to in any layer.

    As :class:`~ragcachekit.policies.query.Query`, but with three differences. All layers are watched: the
    last one alone knows where the answer stands, earlier ones what led there. Each layer's sums are
    brought to a total of 1 and added as square roots, so that no layer and no single token decides
    alone. And the first token of every chunk comes first: an attention sink that thinks it starts the
    prompt misleads every token behind it.
    """

    ratio: float
    encoder: str | None = None
    reads_cache = True
    look = Look(layers=None)

    def __post_init__(self) -> None:
        check_ratio("deep", self.ratio)

    @property
    def name(self) -> str:
        """``deep:r``."""
        return f"deep:{self.ratio:g}"

    def select(self, chunks: Sequence[PlacedChunk]) -> list[int]:
        """Nothing: without a question there is no choice."""
        return []

    def choose(self, chunks: Sequence[PlacedChunk], attention: Sequence[torch.Tensor]) -> list[int]:
        """First tokens, then the highest scores, within the share of all open positions."""
        positions = open_positions(chunks)
        count = share(self.ratio, len(positions))
        first = [chunk.start for chunk in chunks if not chunk.is_exact][:count]
        rest = sorted(set(positions) - set(first))
        sums = torch.stack(tuple(attention))[:, positions]
        # A window that hides all chunks from the question leaves a layer without a say.
        scores = (sums / sums.sum(1, keepdim=True).clamp_min(1e-30)).sqrt().sum(0)
        at = {p: i for i, p in enumerate(positions)}
        return first + top(rest, scores[[at[p] for p in rest]], count - len(first))
