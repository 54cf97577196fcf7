"""``auto``: encoder and policy chosen by a short check on the model; the candidates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ragcachekit.errors import RagCacheError
from ragcachekit.policies.base import PlacedChunk
from ragcachekit.reports import ShownPolicy

Pair = tuple[str, str]
"""Names of an encoder and of a policy over it."""

CANDIDATES: tuple[Pair, ...] = (
    ("system", "impact:0.1"),
    ("system", "deep:0.1"),
    ("standalone", "impact:0.1"),
    ("average:3", "reuse"),
    ("average:3", "impact:0.1"),
    ("average:3", "deep:0.1"),
)
"""What the check measures; of two equally good pairs, the one whose encoder is named first is cheaper."""

NEIGHBOUR_CANDIDATES: tuple[Pair, ...] = (
    ("similar:1", "reuse"),
    ("similar:1", "impact:0.1"),
    ("similar:1", "deep:0.1"),
)
"""Measured as well where neighbours are known."""

DEFAULT: Pair = ("average:3", "impact:0.1")
"""Used before the check."""

ALONE = "standalone"
"""The encoder for chunks behind texts that change or are not known."""

MOST_RATIO = 0.15
"""Candidates that recompute more than this share of cached rows are not chosen."""


@dataclass(frozen=True)
class Auto(ShownPolicy):
    """``auto``: the pair that loses least on this model and these chunks.

    The engine replaces it by that pair (:class:`~ragcachekit.engine.auto.chooser.AutoPolicies`).
    """

    name: str = "auto"
    encoder: str | None = None
    reads_cache: bool = True

    def select(self, chunks: Sequence[PlacedChunk]) -> list[int]:
        """Always raises RagCacheError: the engine has not replaced it."""
        raise RagCacheError("auto stands for a measured policy and selects nothing; give it to RagCache")


def candidates(encoder: str | None, neighbours: bool) -> tuple[Pair, ...]:
    """The pairs to measure, the default first: over ``encoder`` alone if one is given.

    ``neighbours``: whether chunks have known neighbours.
    """
    pairs = (DEFAULT, *CANDIDATES, *(NEIGHBOUR_CANDIDATES if neighbours else ()))
    if encoder is not None:
        pairs = tuple((encoder, policy) for _, policy in pairs)
    elif neighbours:
        pairs = ((NEIGHBOUR_CANDIDATES[0][0], DEFAULT[1]), *pairs)
    return tuple(dict.fromkeys(pairs))
