"""The contracts of this room: who finds registered chunks in a text, and what a segmentation is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from ragcachekit.types import Prompt, Text


class Match(NamedTuple):
    """One occurrence of a registered chunk: ``text[start:end]`` is the chunk's text."""

    start: int
    end: int


@dataclass(frozen=True)
class Matches:
    """What a search found.

    Attributes
    ----------
    found : tuple of Match
        Every occurrence of every registered chunk, overlapping ones included, in no set order.
    complete : bool
        False if the search stopped early because the text matches too much (see
        :class:`ChunkFinder`); ``found`` is then a part and must not be used.
    """

    found: tuple[Match, ...]
    complete: bool = True


@runtime_checkable
class ChunkFinder(Protocol):
    """Finds registered chunks. Implementations promise:

    - Only chunks of the ``namespace`` asked for are found, never another tenant's.
    - The time is linear in ``len(text)`` whatever is registered; a search that would take longer
      stops and says ``complete=False``.
    - ``find`` is thread safe and may run beside registrations.
    """

    def find(self, namespace: str, text: str) -> Matches:
        """All occurrences of the namespace's chunks in ``text``."""
        ...


@dataclass(frozen=True)
class Segmentation:
    """A prompt cut into segments.

    Attributes
    ----------
    prompt : Prompt
        The texts of its segments, joined, are the searched text; no segment is empty. Its notes name
        what was ambiguous.
    fallback : str or None
        Why nothing was segmented although chunks may be there: the prompt is then one ``Text``, an
        ordinary prefill.
    """

    prompt: Prompt
    fallback: str | None = None

    @classmethod
    def plain(cls, text: str, fallback: str | None = None) -> Segmentation:
        """``text`` as one fixed segment (none if it is empty): an ordinary prefill."""
        return cls(Prompt([Text(text)] if text else []), fallback)
