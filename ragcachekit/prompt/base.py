"""Results of chunk searches and segmentations."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from typing import NamedTuple

from ragcachekit.types import Chunk, Ids, Prompt, Segment, Text, chunk_id, part_id

_JOINER = "\u200d"


class Match(NamedTuple):
    """One occurrence of a registered chunk: ``text[start:end]`` is the chunk's text."""

    start: int
    end: int


class Matches(NamedTuple):
    """Result of a search.

    ``found`` are, from left to right, the leftmost occurrences that no word runs across, and of those the
    longest. ``searched`` is the number of characters searched where that is not the whole text. ``parts``
    are beginnings of chunks, a quarter or more of them, whose rest does not follow.
    """

    found: tuple[Match, ...]
    searched: int | None = None
    parts: tuple[Match, ...] = ()


@dataclass(frozen=True)
class Segmentation:
    """A prompt cut into segments, none empty, whose joined texts are the searched text.

    ``fallback`` is why nothing was segmented although chunks may be there: an ordinary prefill.
    """

    prompt: Prompt
    fallback: str | None = None


@dataclass(frozen=True)
class TokenSegment:
    """A tokenised segment; ``is_chunk`` marks retrieved text.

    Where a prompt has only part of a chunk's own tokens (a boundary changed the others), ``own`` are all of
    them, and ``token_ids`` those from number ``first`` on.
    """

    token_ids: Ids
    is_chunk: bool
    own: Ids = ()
    first: int = 0

    def name(self, namespace: str) -> str:
        """The chunk id, or the id of a part; of other text the id of its tokens."""
        if not self.own:
            return chunk_id(self.token_ids, namespace)
        return part_id(chunk_id(self.own, namespace), self.first, self.first + len(self.token_ids))


def stands_apart(segment: Segment) -> bool:
    """Whether the segment is a chunk, or tokenised without special tokens."""
    return isinstance(segment, Chunk) or (isinstance(segment, Text) and segment.split_special_tokens)


def word_runs_across(text: str, edge: int) -> bool:
    """Whether a word, or a character with its marks, runs across the position ``edge``."""
    if edge <= 0 or edge >= len(text):
        return False
    left, right = text[edge - 1], text[edge]
    if _JOINER in (left, right) or _is_mark(right):
        return True
    return (left.isalnum() or _is_mark(left)) and right.isalnum()


def _is_mark(char: str) -> bool:
    return char > "\u02ff" and unicodedata.category(char)[0] == "M"


def common_length(one: str, other: str) -> int:
    """Length of the common beginning: halving, as comparing slices takes no loop over characters."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
