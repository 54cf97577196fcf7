"""Encodings: what a chunk is encoded behind."""

from __future__ import annotations

from dataclasses import dataclass

from ragcachekit.types import Ids


@dataclass(frozen=True)
class Encoding:
    """What a chunk is encoded behind.

    ``name``: ``standalone``, ``sinks:n``, ``system`` or ``prefix``. ``behind``: token ids before the chunk,
    whose KV is dropped. ``length``: use the frequencies of a prompt of this many tokens (longrope); 0 for the
    chunk's own.
    """

    name: str
    behind: Ids = ()
    length: int = 0


@dataclass(frozen=True)
class NeighbourEncoding(Encoding):
    """Encoding ``similar:n``: after ``behind`` (the system text) and, in parallel, neighbours.

    ``neighbours`` are token ids, the least similar first; at least one. ``joint`` stands before the chunk.
    """

    neighbours: tuple[Ids, ...] = ()
    joint: Ids = ()


@dataclass(frozen=True)
class AverageEncoding(Encoding):
    """Encoding ``average:n``: the mean of encodings after ``behind`` and each of ``groups``.

    ``neighbours`` are token ids of n other chunks; ``joint`` stands after each of them.
    """

    neighbours: tuple[Ids, ...] = ()
    joint: Ids = ()

    @property
    def groups(self) -> tuple[tuple[Ids, ...], ...]:
        """What stands before the chunk: the last neighbour, the last two, ... all; of one, also nothing."""
        count = len(self.neighbours)
        return tuple(self.neighbours[first:] for first in range(count - (count > 1), -1, -1))

    def context(self, group: tuple[Ids, ...]) -> Ids:
        """All token ids before the chunk."""
        return (*self.behind, *(token for ids in group for token in (*ids, *self.joint)))


@dataclass(frozen=True)
class InPromptEncoding(Encoding):
    """Encoding ``in-prompt``: after all that preceded the chunk in a real prompt.

    ``segments`` are the lengths of the segments in ``behind``.
    """

    segments: tuple[int, ...] = ()
