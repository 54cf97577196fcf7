"""Special-token strings in retrieved texts: plain text wherever such a text is in a prompt.

A chunk that is found is tokenised without special tokens. A document that a chain cut, re-cased or joined
to other text is fixed text, as the template's own control tokens are.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ragcachekit.prompt.registry import common_length
from ragcachekit.prompt.segments import is_read_apart
from ragcachekit.types import Chunk, Segment, Text

MAX_TEXTS = 1024  # per namespace, those registered or retrieved last
MAX_COMPARISONS = 1 << 16  # occurrences times texts; beyond that every occurrence is plain text
WINDOW = 16  # characters compared before and after an occurrence, without whitespace and special tokens
ENOUGH = 10  # characters in common, before and after together, that decide; role names have fewer


class _Occurrence(NamedTuple):
    """A special-token string in fixed text; ``at`` to ``stop`` are places in the folded prompt."""

    segment: int
    start: int
    end: int
    special: str
    at: int
    begin: int
    stop: int


@dataclass(frozen=True)
class HeldTokens:
    """Places of one special token in a text, the text before the last and the text after the first."""

    before: str
    after: str
    places: frozenset[tuple[str, str]]

    def may_be(self, left: str, right: str) -> bool:
        """Whether an occurrence between these characters may be one of the text's."""
        # On one side: lines between may have been dropped, and everything beyond the other side.
        if (len(left) == WINDOW and left in self.before) or (len(right) == WINDOW and right in self.after):
            return True
        return any(_agree(left, right, *place) for place in self.places)


@dataclass(frozen=True)
class HoldingText:
    """A retrieved text that has special-token strings, by their folded form."""

    text: str
    held: dict[str, HeldTokens] = field(compare=False)


class SpecialTokenTexts:
    """The retrieved texts with special-token strings in them, per namespace. Thread safe."""

    def __init__(self, special_tokens: Iterable[str] = ()) -> None:
        strings = sorted({s for s in special_tokens if _fold(s)}, key=len, reverse=True)
        self._exact = _any_of(strings)
        self._folded = _any_of(sorted({_fold(s) for s in strings}, key=len, reverse=True))
        # Nearly no text has one: most are searched for their first characters only.
        self._firsts = {c for s in strings for c in (s.lstrip()[0].lower(), s.lstrip()[0].upper())}
        self._lock = threading.Lock()
        self._namespaces: dict[str, OrderedDict[str, HoldingText]] = {}
        self._seen: dict[str, set[str]] = {}  # strings; they stay when their texts are forgotten or evicted

    def add(self, namespace: str, texts: Iterable[str]) -> None:
        """Add those of the texts that have a special-token string, in any case and spacing."""
        for text in texts:
            holding = self._holding(text)
            if holding is None:
                continue
            with self._lock:
                self._seen.setdefault(namespace, set()).update(holding.held)
                known = self._namespaces.setdefault(namespace, OrderedDict())
                known[holding.text] = holding
                known.move_to_end(holding.text)
                if len(known) > MAX_TEXTS:
                    known.popitem(last=False)

    def discard(self, namespace: str, texts: Iterable[str]) -> None:
        """Forget these texts; the special-token strings that they had stay known."""
        with self._lock:
            known = self._namespaces.get(namespace, OrderedDict())
            for text in texts:
                known.pop(text.strip(), None)

    def clear(self, namespace: str) -> None:
        """Forget all texts of the namespace; the special-token strings that they had stay known."""
        with self._lock:
            self._namespaces.pop(namespace, None)

    def split(
        self, namespace: str, segments: Sequence[Segment], retrieved: Iterable[str] = ()
    ) -> list[Segment]:
        """Cut fixed text at the special-token strings that may come from a retrieved text.

        Plain text is what such a text has, too, with about the same characters before or after it.
        ``retrieved`` are texts of this prompt alone.
        """
        texts = self._known(namespace, retrieved)
        if not texts:
            return list(segments)
        folded, occurrences = self._occurrences(segments)
        crowded = len(occurrences) * len(texts) > MAX_COMPARISONS
        plain: dict[int, list[tuple[int, int]]] = {}
        for occurrence in occurrences:
            for text in texts:
                held = text.held.get(occurrence.special)
                if held and (crowded or held.may_be(*_around(folded, occurrence, text, segments))):
                    plain.setdefault(occurrence.segment, []).append((occurrence.start, occurrence.end))
                    break
        return [
            piece
            for number, segment in enumerate(segments)
            for piece in (_cut(segment.text or "", plain[number]) if number in plain else [segment])
        ]

    def split_contents(
        self, namespace: str, contents: Sequence[Sequence[Segment]], retrieved: Iterable[str] = ()
    ) -> list[list[Segment]]:
        """Cut contents of chat messages at every special-token string that a retrieved text ever had.

        Control tokens come from the chat template alone, so nothing around an occurrence is compared.
        """
        with self._lock:
            held = set(self._seen.get(namespace, ()))
        held |= {special for text in retrieved if (one := self._holding(text)) for special in one.held}
        if not held:
            return [list(content) for content in contents]

        def pieces(segment: Segment) -> list[Segment]:
            text = segment.text or ""
            spans = [m.span() for m in self._exact.finditer(text) if _fold(m[0]) in held]
            return _cut(text, spans) if not is_read_apart(segment) else [segment]

        return [[piece for segment in content for piece in pieces(segment)] for content in contents]

    def _known(self, namespace: str, retrieved: Iterable[str]) -> list[HoldingText]:
        with self._lock:
            known = list(self._namespaces.get(namespace, {}).values())
        return known + [holding for text in retrieved if (holding := self._holding(text))]

    def _holding(self, text: str) -> HoldingText | None:
        if not any(first in text for first in self._firsts):
            return None
        folded = _fold(text)
        found = list(self._folded.finditer(folded))
        if not found:
            return None
        edges = [0, *(edge for match in found for edge in match.span()), len(folded)]
        runs = [folded[a:b] for a, b in zip(edges[::2], edges[1::2], strict=True)]
        whole, places, at = "".join(runs), dict[str, list[int]](), 0
        for match, run in zip(found, runs, strict=False):
            at += len(run)
            places.setdefault(match[0], []).append(at)
        return HoldingText(
            text.strip(),
            {
                special: HeldTokens(
                    whole[: where[-1]],
                    whole[where[0] :],
                    frozenset((whole[max(at - WINDOW, 0) : at], whole[at : at + WINDOW]) for at in where),
                )
                for special, where in places.items()
            },
        )

    def _occurrences(self, segments: Sequence[Segment]) -> tuple[str, list[_Occurrence]]:
        """The prompt without whitespace, case and special-token strings; and those of its fixed text."""
        runs: list[str] = []
        found: list[_Occurrence] = []
        length = 0
        for number, segment in enumerate(segments):
            text, done, begin, here = segment.text or "", 0, length, list[tuple[int, int, str, int]]()
            for match in self._exact.finditer(text):
                runs.append(_fold(text[done : match.start()]))
                length, done = length + len(runs[-1]), match.end()
                here.append((*match.span(), _fold(match[0]), length))
            runs.append(_fold(text[done:]))
            length += len(runs[-1])
            if not is_read_apart(segment):
                found += (_Occurrence(number, *where, begin, length) for where in here)
        return "".join(runs), found


def _around(
    folded: str, occurrence: _Occurrence, text: HoldingText, segments: Sequence[Segment]
) -> tuple[str, str]:
    """The characters around an occurrence; none of a neighbouring chunk that is this text as a whole."""
    number, at = occurrence.segment, occurrence.at
    begin, stop = max(at - WINDOW, 0), at + WINDOW
    if number and _is_chunk_of(segments[number - 1], text):
        begin = max(begin, occurrence.begin)
    if number + 1 < len(segments) and _is_chunk_of(segments[number + 1], text):
        stop = min(stop, occurrence.stop)
    return folded[begin:at], folded[at:stop]


def _is_chunk_of(segment: Segment, text: HoldingText) -> bool:
    return isinstance(segment, Chunk) and (segment.text or "").strip() == text.text


def _agree(left: str, right: str, text_left: str, text_right: str) -> bool:
    """Whether enough of the characters around a text's own occurrence are equal; half of a few is enough."""
    same = common_length(left[::-1], text_left[::-1]) + common_length(right, text_right)
    return same >= ENOUGH or 2 * same >= len(text_left) + len(text_right)


def _cut(text: str, spans: Iterable[tuple[int, int]]) -> list[Segment]:
    pieces: list[Segment] = []
    done = 0
    for start, end in spans:
        pieces += [Text(text[done:start]), Text(text[start:end], split_special_tokens=True)]
        done = end
    return [piece for piece in (*pieces, Text(text[done:])) if piece.text]


def plain_count(segments: Iterable[Segment]) -> int:
    """Number of segments that are fixed text tokenised without special tokens."""
    return sum(isinstance(s, Text) and s.split_special_tokens for s in segments)


def plain_note(count: int) -> str:
    """The report's note of ``count`` occurrences."""
    strings = f"{count} special-token string{'s' * (count > 1)}"
    return f"{strings} of retrieved text in the prompt's fixed text: read as plain text"


def _any_of(strings: Sequence[str]) -> re.Pattern[str]:
    # Longest first, as tokenizers take them; "(?!)" matches nothing.
    return re.compile("|".join(map(re.escape, strings)) or "(?!)")


def _fold(text: str) -> str:
    return "".join(text.split()).casefold()
