"""Segments of a prompt: cutting a string at its chunks, and segments as token ids."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from ragcachekit.prompt.registry import ChunkRegistry, Match, Matches
from ragcachekit.types import Chunk, Ids, Segment, Text, chunk_id, part_id

PART = "are in the prompt only in part"
"""Of the note on chunks that were cut or altered."""


@dataclass(frozen=True)
class Segmentation:
    """A prompt's segments, none empty, whose joined texts are the searched text.

    ``notes`` are for the report. ``fallback`` is why nothing was segmented although chunks may be there.
    """

    segments: tuple[Segment, ...]
    notes: tuple[str, ...] = ()
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


def segment_text(text: str, registry: ChunkRegistry, namespace: str) -> Segmentation:
    """Cut ``text`` at the namespace's registered chunks: exact, in order, linear in its length.

    Of overlapping occurrences the leftmost, and of those the longest, is taken. An occurrence counts only if
    its edges are not inside a word: the chunk "... a cat" is not found in "... a category".

    The segments' texts, joined, are ``text``; a Chunk's text is exactly the text found.
    """
    matches = registry.find(namespace, text)
    return Segmentation(_cut(text, matches.found), tuple(_notes(matches, len(text))))


def is_read_apart(segment: Segment) -> bool:
    """Whether the segment is a chunk, or text whose special-token strings are plain text."""
    return isinstance(segment, Chunk) or (isinstance(segment, Text) and segment.split_special_tokens)


def merge_texts(segments: Iterable[Segment]) -> list[Segment]:
    """The segments without empty ones, neighbouring Texts joined (all must hold text, not ids).

    Texts with ``split_special_tokens`` stay apart, as chunks do.
    """
    merged: list[Segment] = []
    for apart, run in groupby((s for s in segments if s.text), key=is_read_apart):
        together = list(run)
        merged += together if apart else [Text("".join(s.text or "" for s in together))]
    return merged


def body(text: str) -> str:
    """A chunk's text without the blanks at its end, which some chains strip; of blanks alone, these."""
    return text.rstrip() or text


def blanks_outside(segments: Iterable[Segment]) -> Iterator[Segment]:
    """The segments; blanks at the end of a chunk, see :func:`body`, are added to the text after it."""
    blanks = ""
    for segment in segments:
        if blanks and not is_read_apart(segment) and segment.text is not None:
            yield Text(blanks + segment.text)
        else:
            yield from [Text(blanks)] if blanks else []
            yield segment
        text = segment.text if isinstance(segment, Chunk) else None
        blanks = text[len(body(text)) :] if text else ""
    if blanks:
        yield Text(blanks)


def _cut(text: str, taken: Sequence[Match]) -> tuple[Segment, ...]:
    segments: list[Segment] = []
    done = 0
    for start, end in taken:
        segments += [Text(text[done:start]), Chunk(text[start:end])]
        done = end
    return tuple(s for s in (*segments, Text(text[done:])) if s.text)


def _notes(matches: Matches, length: int) -> Iterator[str]:
    if matches.searched is not None:
        yield (
            f"chunks were searched for in the first {matches.searched} of {length} characters: registered "
            "chunks that repeat themselves nearly match in too many places"
        )
    if matches.parts:
        start, end = matches.parts[0]
        yield (
            f"{len(matches.parts)} registered chunks {PART}: cut or altered, they are computed. The first, "
            f"at character {start}, ends after {end - start} characters; diagnose() says why"
        )
