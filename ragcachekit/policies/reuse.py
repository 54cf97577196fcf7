"""Reuse everything (EPIC section 2.3 calls it Naive, FusionRAG 2.2 full reuse)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ragcachekit.policies.base import PlacedChunk
from ragcachekit.reports import ShownPolicy


@dataclass(frozen=True)
class Reuse(ShownPolicy):
    """Recomputes nothing. ``lego0`` (EPIC section 5.4) is this over ``sinks:4`` encodings."""

    name: str = "reuse"
    encoder: str | None = None
    reads_cache = True

    def select(self, chunks: Sequence[PlacedChunk]) -> list[int]:
        """Nothing."""
        return []
