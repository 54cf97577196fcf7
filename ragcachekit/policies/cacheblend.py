"""CacheBlend (EPIC section 2.3): the tokens whose values deviate most from the linked ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ragcachekit.policies.base import Deviation, PlacedChunk, RatioPolicy, open_positions, share, top

CHECK_LAYER = 1
"""Values of layer 0 depend on the token alone: nothing deviates there."""


@dataclass(frozen=True)
class CacheBlend(RatioPolicy):
    """Layer 0 for all cached tokens; from layer 1 on only the ``ratio`` of them whose V deviates most.

    Layer 1 projects K and V of all tokens and ranks them by the squared deviation of V from the linked V.
    ``gradual`` (``cacheblend-gradual:r``) ranks again at every layer and meets the ratio on average: the
    share falls from 1.5 times the ratio at the check layer to half of it at the last.
    """

    kind = "cacheblend"
    gradual: bool = False

    @property
    def name(self) -> str:
        return f"{self.kind}-gradual:{self.ratio:g}" if self.gradual else f"{self.kind}:{self.ratio:g}"

    def select(self, chunks: Sequence[PlacedChunk]) -> list[int]:
        return open_positions(chunks)

    def narrow(
        self, layer: int, layers: int, rows: Sequence[int], total: int, deviation: Deviation
    ) -> list[int]:
        """The rows that deviate most."""
        ratio = self.ratio
        if self.gradual:
            steps = max(layers - 1 - CHECK_LAYER, 1)
            ratio = min(1.0, ratio * (1.5 - (layer - CHECK_LAYER) / steps))
        elif layer != CHECK_LAYER:
            return list(rows)
        return top(rows, deviation(), min(len(rows), share(ratio, total)))
