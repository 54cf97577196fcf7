"""Policies that are replaced by a measured one: ``auto`` and quality budgets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ragcachekit.errors import RagCacheError
from ragcachekit.policies.base import PlacedChunk

BOUND = 1.1
"""``auto`` allows this multiple of the least KL."""


class _Replaced:
    """A policy that the engine replaces by a measured one."""

    name: str
    encoder: str | None = None
    reads_cache = True

    def select(self, chunks: Sequence[PlacedChunk]) -> list[int]:
        """Raise RagCacheError: the engine has not replaced it."""
        raise RagCacheError(f"{self.name} stands for a calibrated policy; give it to RagCache")


@dataclass(frozen=True)
class Auto(_Replaced):
    """``auto``: the quickest policy and encoder whose loss on this model and these chunks is near the least.

    Near: at most ``bound`` times the least KL. ``auto:1.5`` allows more than ``auto``. The engine replaces it
    by that pair (:class:`~ragcachekit.quality.auto.AutoPolicies`).
    """

    bound: float = BOUND

    def __post_init__(self) -> None:
        if not 1.0 <= self.bound < math.inf:
            raise ValueError(
                f"auto:x needs a multiple x >= 1 of the least KL, such as 1.5, got {self.bound:g}"
            )

    @property
    def name(self) -> str:  # type: ignore[override]
        return "auto" if self.bound == BOUND else f"auto:{self.bound:g}"


@dataclass(frozen=True)
class Budget(_Replaced):
    """``budget:0.05``: the cheapest calibrated policy that loses at most 0.05 on average against ``full``.

    The unit is that of the calibration: nats per token of the answer (KL divergence), unless another quality
    was asked for. The engine replaces it by that policy (:class:`~ragcachekit.quality.records.Budgets`).
    """

    loss: float

    def __post_init__(self) -> None:
        if not 0.0 < self.loss < 1.0:
            raise ValueError(
                f"budget:x needs a loss 0 < x < 1 (nats per answer token), such as 0.05, got {self.loss:g}"
            )

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"budget:{self.loss:g}"
