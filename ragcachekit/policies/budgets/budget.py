"""A quality budget as a policy: it stands for whatever calibration found cheap enough and good enough."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ragcachekit.errors import RagCacheError
from ragcachekit.policies.base import PlacedChunk


@dataclass(frozen=True)
class Budget:
    """``budget:0.01``: at most 0.01 of F1 (one point of a hundred) lost against ``full``.

    It chooses nothing itself: the engine puts the calibrated policy in its place
    (:class:`~ragcachekit.policies.budgets.calibrated.Budgets`).

    Attributes
    ----------
    loss : float
        Greatest loss of mean F1 against ``full``, absolute, between 0 and 1.
    """

    loss: float
    encoder: str | None = None
    reads_cache: bool = True

    def __post_init__(self) -> None:
        if not 0.0 < self.loss < 1.0:
            raise ValueError(f"budget:x needs a loss of F1 0 < x < 1, such as 0.01, got {self.loss:g}")

    @property
    def name(self) -> str:
        """As the user writes it."""
        return f"budget:{self.loss:g}"

    def select(self, chunks: Sequence[PlacedChunk]) -> list[int]:
        """Never chooses.

        Raises
        ------
        RagCacheError
            Always: a budget that reached a prompt was not resolved.
        """
        raise RagCacheError(
            f"{self.name} stands for a calibrated policy and chooses nothing itself; give it to RagCache, or "
            "resolve it with ragcachekit.policies.budgets.calibrated.Budgets"
        )
