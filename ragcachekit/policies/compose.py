"""Unions of policies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ragcachekit.policies.base import GuidedPolicy, LayerwisePolicy, Look, PlacedChunk, SelectionPolicy
from ragcachekit.policies.measured import Auto, Budget
from ragcachekit.reports import ShownPolicy


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

    def choose(self, chunks: Sequence[PlacedChunk], attention: Sequence[torch.Tensor]) -> list[int]:
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
