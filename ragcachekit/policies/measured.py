"""Policies that stand for a measured one: ``auto`` and quality budgets. The engine resolves them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ragcachekit.errors import RagCacheError
from ragcachekit.policies.base import PlacedChunk
from ragcachekit.reports import ShownPolicy


class PolicyAndEncoder(NamedTuple):
    """Names of a policy and of the encoder of the chunks that it selects from."""

    policy: str
    encoder: str

    def __str__(self) -> str:
        return f"{self.policy} on {self.encoder}"


@dataclass(frozen=True)
class Auto(ShownPolicy):
    """``auto``: the policy and encoder that lose least on this model and these chunks.

    The engine replaces it by that pair (:class:`~ragcachekit.quality.auto.AutoPolicies`).
    """

    name: str = "auto"
    encoder: str | None = None
    reads_cache: bool = True

    def select(self, chunks: Sequence[PlacedChunk]) -> list[int]:
        """Raise RagCacheError: the engine has not replaced it."""
        raise RagCacheError("auto stands for a measured policy and selects nothing; give it to RagCache")


@dataclass(frozen=True)
class Budget(ShownPolicy):
    """``budget:0.05``: the cheapest calibrated policy that loses at most 0.05 on average against ``full``.

    The unit is that of the calibration: nats per token of the answer (KL divergence), unless another quality
    was asked for. The engine replaces it by that policy (:class:`~ragcachekit.quality.budget.Budgets`).
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
        """Raise RagCacheError: the engine has not replaced it."""
        raise RagCacheError(
            f"{self.name} stands for a calibrated policy and selects nothing; give it to RagCache"
        )
