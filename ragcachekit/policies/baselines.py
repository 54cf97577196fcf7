"""Baselines: everything computed, everything reused, exact prefixes, first tokens, and random ones."""

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
class Lego:
    """Recomputes the first ``k`` tokens of every chunk that is not exact: LegoLink-k (EPIC section 4.2).

    A chunk encoded alone has an attention sink on its first tokens, which recomputation removes.
    """

    k: int
    encoder: str | None = None
    reads_cache = True

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ValueError(
                f"lego:k needs k >= 1, got {self.k}; lego:0 without recomputation is called lego0"
            )

    @property
    def name(self) -> str:
        return f"lego:{self.k}"

    def select(self, chunks: Sequence[PlacedChunk]) -> list[int]:
        starts = ((c.start, min(c.start + self.k, c.stop)) for c in chunks if not c.is_exact)
        return [position for start, stop in starts for position in range(start, stop)]


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
