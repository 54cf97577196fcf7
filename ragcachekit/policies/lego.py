"""LegoLink-k (EPIC section 4.2): the first k tokens of every chunk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ragcachekit.policies.base import PlacedChunk


@dataclass(frozen=True)
class Lego:
    """Recomputes the first ``k`` tokens of every chunk that is not exact.

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
