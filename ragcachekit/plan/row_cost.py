"""What using an entry at its place in a prompt means for the rows of the forward, and of a pass before it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ragcachekit.policies.base import GuidedPolicy, LayerwisePolicy, PlacedChunk, SelectionPolicy


@dataclass(frozen=True)
class RowCost:
    """Rows of one entry at one place.

    ``spared`` are not computed if it is used, ``recomputed`` are even so. ``is_exact``: it is exact there, so
    no policy has to choose among its rows.
    """

    spared: int
    recomputed: int = 0
    is_exact: bool = False


@dataclass(frozen=True)
class ScoringPass:
    """A pass over the linked cache before the forward, in which a policy watches the question.

    It runs ``rows`` whatever is loaded, those of which nothing is cached, and ends at the last ``watched``
    layer (:attr:`ragcachekit.policies.base.Look.layers`). ``always``: also if nothing is loaded, as there is
    other KV to choose from.
    """

    rows: int
    watched: tuple[int, ...] | None = None
    always: bool = False

    def layers(self, layers: int) -> int:
        """How many of a model's layers the pass runs through."""
        if self.watched is None:
            return layers
        return max(number % layers for number in self.watched) + 1


def row_cost_of(policy: SelectionPolicy, chunk: PlacedChunk, layers: int) -> RowCost:
    """What ``policy`` would make of a chunk of a model with so many layers.

    How many rows a layer-wise policy drops on the way is not known before; its rows count as spared.
    """
    if chunk.is_exact or isinstance(policy, LayerwisePolicy):
        return RowCost(chunk.tokens, is_exact=chunk.is_exact)
    if isinstance(policy, GuidedPolicy):
        # Which rows it will be depends on the question, how many does not.
        watched = layers if policy.look.layers is None else len(policy.look.layers)
        chosen = len(policy.choose([chunk], [torch.ones(chunk.stop)] * watched))
    else:
        chosen = len(policy.select([chunk]))
    return RowCost(chunk.tokens - chosen, chosen)


def scoring_pass_of(policy: SelectionPolicy, rows: int, known: Iterable[PlacedChunk]) -> ScoringPass | None:
    """The pass that ``policy`` needs, if it does; ``known`` are chunks that are there in any case."""
    if not isinstance(policy, GuidedPolicy):
        return None
    return ScoringPass(rows, policy.look.layers, any(not chunk.is_exact for chunk in known))
