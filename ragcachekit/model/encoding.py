"""Encodings: what a chunk is encoded after."""

from __future__ import annotations

from dataclasses import dataclass

from ragcachekit.types import Ids


@dataclass(frozen=True)
class Encoding:
    """What a chunk is encoded after.

    ``name``: ``standalone``, ``sinks:n``, ``system`` or ``prefix``. ``before``: token ids before the chunk,
    whose KV is dropped. ``length``: of the prompt whose frequencies are used (longrope); 0 for the chunk's.
    """

    name: str
    before: Ids = ()
    length: int = 0


@dataclass(frozen=True)
class NeighbourEncoding(Encoding):
    """Encoding ``similar:n``: after ``before`` (the system text) and, in parallel, neighbours.

    ``neighbours`` are token ids, the least similar first; at least one. ``joint`` is before the chunk.
    """

    neighbours: tuple[Ids, ...] = ()
    joint: Ids = ()


@dataclass(frozen=True)
class AverageEncoding(Encoding):
    """Encoding ``average:n``: the mean of encodings after ``before`` and each of ``groups``.

    ``neighbours`` are token ids of n other chunks; ``joint`` is after each of them.
    """

    neighbours: tuple[Ids, ...] = ()
    joint: Ids = ()

    @property
    def groups(self) -> tuple[tuple[Ids, ...], ...]:
        """What precedes the chunk: the last neighbour, the last two, ... all; of one, also nothing."""
        count = len(self.neighbours)
        return tuple(self.neighbours[first:] for first in range(count - (count > 1), -1, -1))

    def context(self, group: tuple[Ids, ...]) -> Ids:
        """All token ids before the chunk."""
        return (*self.before, *(token for ids in group for token in (*ids, *self.joint)))


@dataclass(frozen=True)
class InPromptEncoding(Encoding):
    """Encoding ``in-prompt``: after all that preceded the chunk in a real prompt.

    ``segments`` are the lengths of the segments in ``before``.
    """

    segments: tuple[int, ...] = ()
