"""Cutting a string at the registered chunks in it."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator, Sequence

from ragcachekit.prompt.base import ChunkFinder, Match, Segmentation
from ragcachekit.types import Chunk, Prompt, Segment, Text

TOO_MANY = "the prompt matches registered chunks in too many places to be searched in linear time"
_JOINER = "\u200d"


def segment_text(text: str, registry: ChunkFinder, namespace: str) -> Segmentation:
    """Cut ``text`` at the namespace's registered chunks: exact, in order, linear in its length.

    Of overlapping occurrences the leftmost, and of those the longest, is taken; what was passed over
    is named in the prompt's notes (the rest of a chunk that was cut into is computed, so an
    ambiguity costs reuse, never correctness). An occurrence counts only if no word runs across its
    edges: the chunk "... a cat" is not found in "... a category".

    Parameters
    ----------
    text : str
        The whole prompt, as it will be tokenised.
    registry : ChunkFinder
        Usually a :class:`~ragcachekit.prompt.registry.ChunkRegistry`.
    namespace : str
        Whose chunks to look for.

    Returns
    -------
    Segmentation
        The segments' texts, joined, are ``text``; a Chunk's text is exactly the text found.
    """
    matches = registry.find(namespace, text)
    if not matches.complete:
        return Segmentation.plain(text, TOO_MANY)
    whole = [m for m in matches.found if not (_glued(text, m.start) or _glued(text, m.end))]
    taken, passed_over = _leftmost_longest(whole)
    rivals = [m for m, winner in passed_over if not _same_chunk(text, m, winner)]
    return Segmentation(Prompt(_cut(text, taken), _ambiguity(rivals)))


def merge_texts(segments: Iterable[Segment]) -> list[Segment]:
    """The segments without empty ones, neighbouring Texts joined (all must hold text, not ids)."""
    merged: list[Segment] = []
    run: list[str] = []
    for segment in segments:
        if isinstance(segment, Chunk) and segment.text:
            if run:
                merged.append(Text("".join(run)))
                run = []
            merged.append(segment)
        elif segment.text:
            run.append(segment.text)
    return [*merged, Text("".join(run))] if run else merged


def body(text: str) -> str:
    """A chunk's text without the blanks at its end, which chains strip or keep; of blanks alone, these."""
    return text.rstrip() or text


def blanks_outside(segments: Iterable[Segment]) -> Iterator[Segment]:
    """The segments; what :func:`body` leaves out of a chunk is added to the text behind it.

    The chunks are as they were: whoever tokenises them takes their body.
    Blanks at a chunk's beginning stay in it: outside they would change the text before the first chunk,
    which others may be encoded behind.
    """
    blanks = ""
    for segment in segments:
        if blanks and isinstance(segment, Text) and segment.text is not None:
            yield Text(blanks + segment.text)
        else:
            yield from [Text(blanks)] if blanks else []
            yield segment
        text = segment.text if isinstance(segment, Chunk) else None
        blanks = text[len(body(text)) :] if text else ""
    if blanks:
        yield Text(blanks)


def _leftmost_longest(matches: Sequence[Match]) -> tuple[list[Match], list[tuple[Match, Match]]]:
    """The matches taken, and those passed over, each with the taken one that it overlaps."""
    taken: list[Match] = []
    passed_over: list[tuple[Match, Match]] = []
    for match in sorted(matches, key=lambda m: (m.start, -m.end)):
        if not taken or match.start >= taken[-1].end:
            taken.append(match)
        else:
            passed_over.append((match, taken[-1]))
    return taken, passed_over


def _cut(text: str, taken: Sequence[Match]) -> list[Segment]:
    segments: list[Segment] = []
    done = 0
    for start, end in taken:
        segments += [Text(text[done:start]), Chunk(text[start:end])]
        done = end
    return [s for s in (*segments, Text(text[done:])) if s.text]


def _ambiguity(rivals: Sequence[Match]) -> tuple[str, ...]:
    if not rivals:
        return ()
    count = f"{len(rivals)} other registered chunk{'s' * (len(rivals) > 1)}"
    return (
        f"ambiguous: {count} overlapped the ones taken (leftmost, then longest), "
        f"the first at character {min(rivals).start}",
    )


def _same_chunk(text: str, match: Match, winner: Match) -> bool:
    """Whether the match is the winner without outer whitespace: two forms of one chunk."""
    if match.start < winner.start or match.end > winner.end:
        return False
    # Not strip() of both: the margins alone are short, the chunks may be long.
    return not (text[winner.start : match.start].strip() or text[match.end : winner.end].strip())


def _glued(text: str, edge: int) -> bool:
    """Whether a word, or a character with its marks, runs across the position ``edge``."""
    if edge <= 0 or edge >= len(text):
        return False
    left, right = text[edge - 1], text[edge]
    if _JOINER in (left, right) or _is_mark(right):
        return True
    return (left.isalnum() or _is_mark(left)) and right.isalnum()


def _is_mark(char: str) -> bool:
    return char > "\u02ff" and unicodedata.category(char)[0] == "M"
