"""Rows that an entry spares and costs: in the forward, and in a scoring pass before it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ragcachekit.policies.base import GuidedPolicy, LayerwisePolicy, PlacedChunk, SelectionPolicy


@dataclass(frozen=True)
class RowCost:
    """Rows that using an entry spares and recomputes; ``is_exact``: no policy selects among its rows."""

    spared: int
    recomputed: int = 0
    is_exact: bool = False


@dataclass(frozen=True)
class ScoringPass:
    """A pass over the linked cache before the forward, in which a policy observes the question.

    It runs ``rows``, those of which nothing is cached, up to the last ``watched`` layer
    (:attr:`.Look.layers`); ``always``: also if nothing is loaded, as other cached chunks are not exact.
    """

    rows: int
    watched: tuple[int, ...] | None = None
    always: bool = False

    def layers(self, layers: int) -> int:
        """Number of a model's layers that the pass runs through."""
        if self.watched is None:
            return layers
        return max(number % layers for number in self.watched) + 1


def row_cost_of(policy: SelectionPolicy, chunk: PlacedChunk, layers: int) -> RowCost:
    """Row cost of a chunk under ``policy``; all rows of a layer-wise one count as spared."""
    if chunk.is_exact or isinstance(policy, LayerwisePolicy):
        return RowCost(chunk.tokens, is_exact=chunk.is_exact)
    if isinstance(policy, GuidedPolicy):
        # The question decides which rows, not how many.
        watched = layers if policy.look.layers is None else len(policy.look.layers)
        chosen = len(policy.choose([chunk], [torch.ones(chunk.stop)] * watched))
    else:
        chosen = len(policy.select([chunk]))
    return RowCost(chunk.tokens - chosen, chosen)


def scoring_pass_of(policy: SelectionPolicy, rows: int, known: Iterable[PlacedChunk]) -> ScoringPass | None:
    """The scoring pass of ``policy``, if it has one; ``known`` are chunks that are cached in any case."""
    if not isinstance(policy, GuidedPolicy):
        return None
    return ScoringPass(rows, policy.look.layers, any(not chunk.is_exact for chunk in known))
