"""The null policy: nothing is reused; the baseline of every benchmark."""

from __future__ import annotations

from collections.abc import Sequence

from ragcachekit.policies.base import PlacedChunk, open_positions
from ragcachekit.reports import ShownPolicy


class Full(ShownPolicy):
    """An ordinary prefill over the same token ids."""

    name = "full"
    encoder: str | None = None
    reads_cache = False

    def select(self, chunks: Sequence[PlacedChunk]) -> list[int]:
        """Every cached row that is not exact."""
        return open_positions(chunks)
