"""Special-token strings in retrieved texts: plain text wherever such a text stands in a prompt.

A chunk that is found is tokenised without special tokens. A document that a chain cut, re-cased or joined
to other text is fixed text, as the template's own control tokens are.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ragcachekit.prompt.base import common_length, stands_apart
from ragcachekit.types import Segment, Text

MOST_TEXTS = 1024  # per namespace, those registered or retrieved last
MOST_COMPARISONS = 1 << 16  # occurrences times texts; beyond that every occurrence is plain text
WINDOW = 16  # characters compared before and after an occurrence, without whitespace and special tokens
ENOUGH = 10  # characters in common, before and after together, that decide; role names have fewer

Places = Mapping[str, frozenset[tuple[str, str]]]
"""Special-token strings of a text, folded, and the characters before and after each occurrence."""


class _Occurrence(NamedTuple):
    """A special-token string in a text; ``left`` and ``right`` are the folded characters around it."""

    start: int
    end: int
    special: str
    left: str
    right: str

    def may_be_in(self, text: Places) -> bool:
        """Whether enough characters are those around an occurrence of ``text``; half of a few is enough."""
        for left, right in text.get(self.special, ()):
            same = common_length(self.left[::-1], left[::-1]) + common_length(self.right, right)
            if same >= ENOUGH or 2 * same >= len(left) + len(right):
                return True
        return False


class SpecialTokenTexts:
    """The retrieved texts with special-token strings in them, per namespace. Thread safe."""

    def __init__(self, special_tokens: Iterable[str] = ()) -> None:
        strings = sorted({s for s in special_tokens if _fold(s)}, key=len, reverse=True)
        self._exact = _any_of(strings)
        self._folded = _any_of(sorted({_fold(s) for s in strings}, key=len, reverse=True))
        # Nearly no text has one: most are searched for their first characters only.
        self._firsts = {c for s in strings for c in (s.lstrip()[0].lower(), s.lstrip()[0].upper())}
        self._lock = threading.Lock()
        self._namespaces: dict[str, OrderedDict[str, Places]] = {}
        self._seen: dict[str, set[str]] = {}  # strings; they stay when their texts are forgotten or evicted

    def add(self, namespace: str, texts: Iterable[str]) -> None:
        """Add those of the texts that have a special-token string, in any case and spacing."""
        for text in texts:
            if not (places := self._places(text)):
                continue
            with self._lock:
                self._seen.setdefault(namespace, set()).update(places)
                known = self._namespaces.setdefault(namespace, OrderedDict())
                known[text.strip()] = places
                known.move_to_end(text.strip())
                if len(known) > MOST_TEXTS:
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

        Plain text is what such a text has, too, with about the same characters before or after it in the
        same segment. ``retrieved`` are texts of this prompt alone.
        """
        with self._lock:
            known = list(self._namespaces.get(namespace, {}).values())
        known += filter(None, map(self._places, retrieved))
        if not known:
            return list(segments)
        found = [
            [] if stands_apart(segment) else list(_occurrences(self._exact, segment.text or ""))
            for segment in segments
        ]
        crowded = sum(map(len, found)) * len(known) > MOST_COMPARISONS

        def is_plain(occurrence: _Occurrence) -> bool:
            if crowded:
                return any(occurrence.special in text for text in known)
            return any(occurrence.may_be_in(text) for text in known)

        spans = [[(one.start, one.end) for one in ones if is_plain(one)] for ones in found]
        return _cut(segments, spans)

    def split_contents(
        self, namespace: str, contents: Sequence[Sequence[Segment]], retrieved: Iterable[str] = ()
    ) -> list[list[Segment]]:
        """Cut contents of chat messages at every special-token string that a retrieved text ever had.

        Control tokens come from the chat template alone, so nothing around an occurrence is compared.
        """
        with self._lock:
            held = set(self._seen.get(namespace, ()))
        held.update(*map(self._places, retrieved))

        def spans(segment: Segment) -> list[tuple[int, int]]:
            found = [] if stands_apart(segment) or not held else self._exact.finditer(segment.text or "")
            return [match.span() for match in found if _fold(match[0]) in held]

        return [_cut(content, [spans(segment) for segment in content]) for content in contents]

    def _places(self, text: str) -> Places:
        if not any(first in text for first in self._firsts):
            return {}
        places: dict[str, set[tuple[str, str]]] = {}
        for one in _occurrences(self._folded, _fold(text)):
            places.setdefault(one.special, set()).add((one.left, one.right))
        return {special: frozenset(where) for special, where in places.items()}


def _occurrences(pattern: re.Pattern[str], text: str) -> Iterator[_Occurrence]:
    if not (found := list(pattern.finditer(text))):
        return
    edges = [0, *(edge for match in found for edge in match.span()), len(text)]
    runs = [_fold(text[start:end]) for start, end in zip(edges[::2], edges[1::2], strict=True)]
    whole, at = "".join(runs), 0
    for match, run in zip(found, runs, strict=False):
        at += len(run)
        left, right = whole[max(at - WINDOW, 0) : at], whole[at : at + WINDOW]
        yield _Occurrence(*match.span(), _fold(match[0]), left, right)


def _cut(segments: Sequence[Segment], spans: Sequence[Sequence[tuple[int, int]]]) -> list[Segment]:
    """The segments, each with its spans cut out as plain text."""
    pieces: list[Segment] = []
    for segment, places in zip(segments, spans, strict=True):
        cut: list[Segment] = []
        text, done = segment.text or "", 0
        for start, end in places:
            cut += [Text(text[done:start]), Text(text[start:end], split_special_tokens=True)]
            done = end
        pieces += [piece for piece in (*cut, Text(text[done:])) if piece.text] if places else [segment]
    return pieces


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
