"""Policies that are replaced by a measured one: ``auto`` and quality budgets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ragcachekit.errors import RagCacheError
from ragcachekit.policies.base import PlacedChunk
from ragcachekit.reports import ShownPolicy


class _Replaced(ShownPolicy):
    """A policy that the engine replaces by a measured one."""

    name: str
    encoder: str | None = None
    reads_cache = True

    def select(self, chunks: Sequence[PlacedChunk]) -> list[int]:
        """Raise RagCacheError: the engine has not replaced it."""
        raise RagCacheError(f"{self.name} stands for a calibrated policy; give it to RagCache")


@dataclass(frozen=True)
class Auto(_Replaced):
    """``auto``: the policy and encoder that lose least on this model and these chunks.

    The engine replaces it by that pair (:class:`~ragcachekit.quality.auto.AutoPolicies`).
    """

    name: str = "auto"


@dataclass(frozen=True)
class Budget(_Replaced):
    """``budget:0.05``: the cheapest calibrated policy that loses at most 0.05 on average against ``full``.

    The unit is that of the calibration: nats per token of the answer (KL divergence), unless another quality
    was asked for. The engine replaces it by that policy (:class:`~ragcachekit.quality.budget.Budgets`).
    """

    loss: float

    def __post_init__(self) -> None:
        if not 0.0 < self.loss < 1.0:
            raise ValueError(
                f"budget:x needs a loss 0 < x < 1 (nats per answer token), such as 0.05, got {self.loss:g}"
            )

    @property
    def name(self) -> str:  # type: ignore[override]
        """``budget:x``."""
        return f"budget:{self.loss:g}"
