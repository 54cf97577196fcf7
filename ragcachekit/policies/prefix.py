"""Exact prefix only: what every serving system does, as a baseline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ragcachekit.policies.base import PlacedChunk, open_positions
from ragcachekit.reports import ShownPolicy


@dataclass(frozen=True)
class Prefix(ShownPolicy):
    """Recomputes every row that is not exact: answers are those of ``full``."""

    encoder: str | None = None
    reads_cache = True
    exact_only = True
    name = "prefix"

    def select(self, chunks: Sequence[PlacedChunk]) -> list[int]:
        """Every position that is not exact."""
        return open_positions(chunks)
