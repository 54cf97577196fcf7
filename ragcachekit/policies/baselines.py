"""Baselines: everything computed, everything reused, the exact prefix alone, and random tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from ragcachekit.policies.base import PlacedChunk, RatioPolicy, open_positions, share


class Full:
    """An ordinary prefill over the same token ids: the null policy, and the baseline of every benchmark."""

    name = "full"
    encoder: str | None = None
    reads_cache = False

    def select(self, chunks: Sequence[PlacedChunk]) -> list[int]:
        return open_positions(chunks)


@dataclass(frozen=True)
class Reuse:
    """Recomputes nothing (EPIC section 2.3 calls it Naive, FusionRAG 2.2 full reuse).

    ``lego0`` (EPIC section 5.4) is this over ``sinks:4`` encodings.
    """

    name: str = "reuse"
    encoder: str | None = None
    reads_cache = True

    def select(self, chunks: Sequence[PlacedChunk]) -> list[int]:
        return []


@dataclass(frozen=True)
class Prefix:
    """Recomputes every row that is not exact, as serving systems do: answers are those of ``full``."""

    encoder: str | None = None
    reads_cache = True
    exact_only = True
    name = "prefix"

    def select(self, chunks: Sequence[PlacedChunk]) -> list[int]:
        return open_positions(chunks)


@dataclass(frozen=True)
class Random(RatioPolicy):
    """Recomputes in every chunk a random share of its tokens, drawn from the chunk's id: the control."""

    kind = "random"

    def select(self, chunks: Sequence[PlacedChunk]) -> list[int]:
        """The same tokens of a chunk at every use."""
        out = []
        for chunk in [chunk for chunk in chunks if not chunk.is_exact]:
            positions, count = range(chunk.start, chunk.stop), share(self.ratio, chunk.tokens)
            out += random.Random(chunk.chunk_id).sample(positions, count)
        return out
