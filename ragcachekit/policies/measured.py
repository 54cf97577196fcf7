"""Policies that are replaced by a measured one, ``auto`` and quality budgets, and unions of policies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from ragcachekit.errors import RagCacheError
from ragcachekit.policies.base import GuidedPolicy, LayerwisePolicy, Look, PlacedChunk, SelectionPolicy
from ragcachekit.reports import ShownPolicy


class PolicyAndEncoder(NamedTuple):
    """Names of a policy and of the encoder of the chunks that it selects from."""

    policy: str
    encoder: str

    def __str__(self) -> str:
        return f"{self.policy} on {self.encoder}"


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


@dataclass(frozen=True)
class Union(ShownPolicy):
    """``lego:4+query:0.1``: the union of its parts' choices."""

    parts: tuple[SelectionPolicy, ...]
    reads_cache = True

    @property
    def name(self) -> str:
        """The parts' names, joined by ``+``."""
        return "+".join(part.name for part in self.parts)

    @property
    def encoder(self) -> str | None:
        """The encoder that a part requires."""
        return next((part.encoder for part in self.parts if part.encoder), None)

    def select(self, chunks: Sequence[PlacedChunk]) -> list[int]:
        """What any part selects."""
        return sorted({p for part in self.parts for p in part.select(chunks)})


@dataclass(frozen=True)
class GuidedUnion(Union):
    """A union with parts that choose by the question's attention."""

    look: Look

    def choose(self, chunks: Sequence[PlacedChunk], attention: Sequence[Tensor]) -> list[int]:
        """What any part chooses."""
        chosen = (
            part.choose(chunks, attention) if isinstance(part, GuidedPolicy) else part.select(chunks)
            for part in self.parts
        )
        return sorted(set().union(*chosen))


def union(parts: Sequence[SelectionPolicy]) -> SelectionPolicy:
    """Compose policies.

    ValueError for ``full``, budgets, ``auto``, layer-wise ones, different encoders or looks.
    """
    if any(not part.reads_cache for part in parts):
        raise ValueError("full recomputes everything; there is nothing to add to it")
    if any(isinstance(part, Budget | Auto) for part in parts):
        raise ValueError("a budget, or auto, stands for a whole measured policy and stands alone")
    if any(isinstance(part, LayerwisePolicy) for part in parts):
        raise ValueError("a layer-wise policy (cacheblend) chooses inside its forward and stands alone")
    if len({part.encoder for part in parts if part.encoder}) > 1:
        raise ValueError("the parts insist on different encoders")
    looks = {part.look for part in parts if isinstance(part, GuidedPolicy)}
    if len(looks) > 1:
        raise ValueError("the parts watch the question in different ways; use one of them")
    return GuidedUnion(tuple(parts), looks.pop()) if looks else Union(tuple(parts))
