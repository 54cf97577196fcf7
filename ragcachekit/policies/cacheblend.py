"""CacheBlend (EPIC section 2.3): the tokens whose values deviate most from the linked ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ragcachekit.policies.base import Deviation, PlacedChunk, check_ratio, open_positions, share, top

CHECK_LAYER = 1
"""Values of layer 0 depend on the token alone: nothing deviates there."""


@dataclass(frozen=True)
class CacheBlend:
    """Layer 0 for all cached tokens; from layer 1 on only the ``ratio`` of them whose V deviates most.

    Layer 1 projects K and V of all tokens, ranks by the squared deviation of V from the linked V, and
    keeps what it projected. ``gradual`` ranks again at every layer, from 1.5 times the ratio at the
    check layer down to half of it at the last: the ratio is met on average.
    """

    ratio: float
    gradual: bool = False
    encoder: str | None = None
    reads_cache = True

    def __post_init__(self) -> None:
        check_ratio(self._kind, self.ratio)

    @property
    def name(self) -> str:
        """``cacheblend:r`` or ``cacheblend-gradual:r``."""
        return f"{self._kind}:{self.ratio:g}"

    @property
    def _kind(self) -> str:
        return "cacheblend-gradual" if self.gradual else "cacheblend"

    def select(self, chunks: Sequence[PlacedChunk]) -> list[int]:
        """All of them run through layer 0."""
        return open_positions(chunks)

    def narrow(
        self, layer: int, layers: int, rows: Sequence[int], total: int, deviation: Deviation
    ) -> list[int]:
        """The rows that deviate most."""
        if layer < CHECK_LAYER or (layer > CHECK_LAYER and not self.gradual):
            return list(rows)
        count = min(len(rows), share(self._ratio_at(layer, layers), total))
        return top(rows, deviation(), count)

    def _ratio_at(self, layer: int, layers: int) -> float:
        if not self.gradual:
            return self.ratio
        steps = max(layers - 1 - CHECK_LAYER, 1)
        return min(1.0, self.ratio * (1.5 - (layer - CHECK_LAYER) / steps))
