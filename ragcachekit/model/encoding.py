"""Encodings: what a chunk is encoded behind."""

from __future__ import annotations

from dataclasses import dataclass

Ids = tuple[int, ...]
"""Token ids."""


@dataclass(frozen=True)
class Encoding:
    """What a chunk is encoded behind.

    Attributes
    ----------
    name : str
        ``standalone``, ``sinks:n``, ``system`` or ``prefix``.
    behind : tuple of int
        Token ids that stand before the chunk and whose KV is dropped.
    length : int
        Use the frequencies of a prompt of this many tokens (longrope); 0 for the chunk's own.
    """

    name: str
    behind: Ids = ()
    length: int = 0


@dataclass(frozen=True)
class NeighbourEncoding(Encoding):
    """Behind ``behind`` (the system text) and chunks that are blind to each other: ``similar:n``.

    Attributes
    ----------
    neighbours : tuple of tuple of int
        Their token ids, the least similar first and the most similar next to the chunk; at least one.
    """

    neighbours: tuple[Ids, ...] = ()


@dataclass(frozen=True)
class InPromptEncoding(Encoding):
    """Behind all that stood before the chunk in a real prompt, which is ``behind``: ``in-prompt``.

    Attributes
    ----------
    segments : tuple of int
        Lengths of the segments that ``behind`` consists of.
    """

    segments: tuple[int, ...] = ()
