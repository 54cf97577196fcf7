"""A quality budget as a policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ragcachekit.errors import RagCacheError
from ragcachekit.policies.base import PlacedChunk
from ragcachekit.reports import ShownPolicy


@dataclass(frozen=True)
class Budget(ShownPolicy):
    """``budget:0.05``: the cheapest calibrated policy that loses at most 0.05 on average against ``full``.

    The unit is that of the calibration: nats per token of the answer (KL divergence), unless another quality
    was asked for.

    The engine replaces it by that policy (:class:`~ragcachekit.policies.budgets.calibration.Budgets`).
    """

    loss: float
    encoder: str | None = None
    reads_cache: bool = True

    def __post_init__(self) -> None:
        if not 0.0 < self.loss < 1.0:
            raise ValueError(
                f"budget:x needs a loss 0 < x < 1 (nats per answer token), such as 0.05, got {self.loss:g}"
            )

    @property
    def name(self) -> str:
        """``budget:x``."""
        return f"budget:{self.loss:g}"

    def select(self, chunks: Sequence[PlacedChunk]) -> list[int]:
        """Always raises RagCacheError: the budget was not resolved."""
        raise RagCacheError(
            f"{self.name} stands for a calibrated policy and chooses nothing itself; give it to RagCache, or "
            "resolve it with ragcachekit.policies.budgets.calibration.Budgets"
        )
