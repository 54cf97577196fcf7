"""Cutting a string at the registered chunks in it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ragcachekit.prompt.base import Match, Matches, Segmentation, stands_apart
from ragcachekit.prompt.registry import ChunkRegistry
from ragcachekit.types import Chunk, Prompt, Segment, Text

PART = "begin in the prompt and do not stand there whole"
"""Of the note on chunks that were cut or altered."""


def segment_text(text: str, registry: ChunkRegistry, namespace: str) -> Segmentation:
    """Cut ``text`` at the namespace's registered chunks: exact, in order, linear in its length.

    Of overlapping occurrences the leftmost, and of those the longest, is taken. An occurrence counts only if
    no word runs across its edges: the chunk "... a cat" is not found in "... a category".

    The segments' texts, joined, are ``text``; a Chunk's text is exactly the text found.
    """
    matches = registry.find(namespace, text)
    return Segmentation(Prompt(_cut(text, matches.found), tuple(_notes(matches, len(text)))))


def merge_texts(segments: Iterable[Segment]) -> list[Segment]:
    """The segments without empty ones, neighbouring Texts joined (all must hold text, not ids).

    Texts with ``split_special_tokens`` stay apart, as chunks do.
    """
    merged: list[Segment] = []
    run: list[str] = []
    for segment in segments:
        if segment.text and stands_apart(segment):
            if run:
                merged.append(Text("".join(run)))
                run = []
            merged.append(segment)
        elif segment.text:
            run.append(segment.text)
    return [*merged, Text("".join(run))] if run else merged


def body(text: str) -> str:
    """A chunk's text without the blanks at its end, which some chains strip; of blanks alone, these."""
    return text.rstrip() or text


def blanks_outside(segments: Iterable[Segment]) -> Iterator[Segment]:
    """The segments; blanks at the end of a chunk, see :func:`body`, are added to the text after it."""
    blanks = ""
    for segment in segments:
        if blanks and not stands_apart(segment) and segment.text is not None:
            yield Text(blanks + segment.text)
        else:
            yield from [Text(blanks)] if blanks else []
            yield segment
        text = segment.text if isinstance(segment, Chunk) else None
        blanks = text[len(body(text)) :] if text else ""
    if blanks:
        yield Text(blanks)


def _cut(text: str, taken: Sequence[Match]) -> list[Segment]:
    segments: list[Segment] = []
    done = 0
    for start, end in taken:
        segments += [Text(text[done:start]), Chunk(text[start:end])]
        done = end
    return [s for s in (*segments, Text(text[done:])) if s.text]


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
