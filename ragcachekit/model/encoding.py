"""Encodings: what a chunk is encoded behind."""

from __future__ import annotations

from dataclasses import dataclass

Ids = tuple[int, ...]  # token ids


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
    """Encoding ``average:n``: the mean of encodings, each after ``behind`` and one of ``groups``.

    ``groups`` are token ids of other chunks; ``joint`` stands after each of them.
    """

    groups: tuple[tuple[Ids, ...], ...] = ()
    joint: Ids = ()

    @property
    def contexts(self) -> tuple[Ids, ...]:
        """Everything before the chunk, per group."""
        joined = ((token for ids in group for token in (*ids, *self.joint)) for group in self.groups)
        return tuple((*self.behind, *tokens) for tokens in joined)


@dataclass(frozen=True)
class InPromptEncoding(Encoding):
    """Encoding ``in-prompt``: after all that preceded the chunk in a real prompt.

    ``segments`` are the lengths of the segments in ``behind``.
    """

    segments: tuple[int, ...] = ()
