"""The contract of selection policies: which cached tokens are recomputed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class PlacedChunk:
    """A cached chunk at its place in a prompt.

    Attributes
    ----------
    chunk_id : str
    start : int
        Position of its first token.
    tokens : int
    exempt : bool
        Exact where it stands (behind exactly what it was encoded behind): needs no recomputation.
    """

    chunk_id: str
    start: int
    tokens: int
    exempt: bool

    @property
    def stop(self) -> int:
        """Position after its last token."""
        return self.start + self.tokens


class SelectionPolicy(Protocol):
    """Chooses which cached rows a prompt recomputes. Implementations promise:

    - ``select`` returns positions inside non-exempt chunks only, in any order, each at most once;
    - the same chunks give the same positions (stateless, thread safe);
    - what is not cached is never their business: it is always computed.
    """

    @property
    def name(self) -> str:
        """As the user writes it, e.g. ``lego:16``."""
        ...

    @property
    def encoder(self) -> str | None:
        """The encoding this policy was designed for, where it insists on one (``lego0``: ``sinks:4``)."""
        ...

    @property
    def reads_cache(self) -> bool:
        """False if nothing cached is used at all (``full``)."""
        ...

    def select(self, chunks: Sequence[PlacedChunk]) -> list[int]:
        """Positions to recompute."""
        ...
