"""Many texts searched for at once: Aho-Corasick over the first characters of each, then a bisection.

An automaton over whole chunks took 4.3 s and 450 MB for 10,000 chunks of 1,000 characters; over
32 characters of each it takes 0.07 s and 13 MB, and scans just as fast.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any, NamedTuple

import ahocorasick

from ragcachekit.prompt.base import MOST_OVERLAPPED, Match, Matches, common_length, word_runs_across

ANCHOR_CHARS = 32
GROWTH = 4
"""A level is merged into the one before it unless that one is more than this many times larger."""

_BASE_BUDGET = 100_000
_BUDGET_PER_CHAR = 8


class _Candidates:
    """The texts that begin with one anchor, sorted."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.longest = 0

    def add(self, text: str) -> None:
        insort(self.texts, text)
        self.longest = max(self.longest, len(text))


class _Place(NamedTuple):
    start: int
    candidates: _Candidates


class _Search:
    """One pass over candidate places of a text, from left to right."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._budget = _BASE_BUDGET + _BUDGET_PER_CHAR * len(text)
        self._steps = 0
        self._found: list[Match] = []
        self._overlapped: list[Match] = []

    def over(self, places: Iterable[_Place]) -> Matches:
        """The matches at these places, which must be in the order of their starts."""
        for start, here in groupby(places, lambda place: place.start):
            if self._may_begin(start):
                matches = [match for place in here for match in self._matches(place)]
                if self._steps > self._budget:
                    return Matches(tuple(self._found), tuple(self._overlapped), start, self._steps)
                self._take(matches)
        return Matches(tuple(self._found), tuple(self._overlapped), None, self._steps)

    def _may_begin(self, start: int) -> bool:
        # No chunk can begin inside of another. Half of the budget is for places where one can.
        inside = bool(self._found) and start < self._found[-1].end
        if inside and (len(self._overlapped) >= MOST_OVERLAPPED or 2 * self._steps > self._budget):
            return False
        return not word_runs_across(self._text, start)

    def _matches(self, place: _Place) -> Iterator[Match]:
        start, texts = place.start, place.candidates.texts
        window = self._text[start : start + place.candidates.longest]
        wanted = 1 + MOST_OVERLAPPED - len(self._overlapped)
        while wanted and self._steps <= self._budget:
            number = bisect_right(texts, window) - 1
            self._steps += (len(texts).bit_length() + 1) * (1 + (len(window) >> 6))
            if number < 0:
                return
            # A text that the window begins with is no longer than what it shares with its predecessor.
            length = common_length(texts[number], window)
            if length < len(texts[number]):
                window = window[:length]
                continue
            if not word_runs_across(self._text, start + length):
                yield Match(start, start + length)
                wanted -= 1
            window = window[: length - 1]

    def _take(self, here: list[Match]) -> None:
        matches = sorted(here, reverse=True)
        if matches and (not self._found or matches[0].start >= self._found[-1].end):
            self._found.append(matches.pop(0))
        self._overlapped += matches[: MOST_OVERLAPPED - len(self._overlapped)]


class AnchorIndex:
    """A set of texts (each at least one character) that can be searched for all at once.

    New anchors form a small automaton of their own, and automata of similar size are merged: each anchor
    is rebuilt a logarithmic number of times. Automata are also rebuilt when most of their anchors are dead.
    Not thread safe.
    """

    def __init__(self) -> None:
        self._candidates: dict[str, _Candidates] = {}
        self._levels: list[tuple[frozenset[str], Any]] = []
        self._indexed: set[str] = set()
        self._pending: set[str] = set()

    def add(self, text: str) -> None:
        """Index ``text``, which must not be indexed already."""
        anchor = text[:ANCHOR_CHARS]
        self._candidates.setdefault(anchor, _Candidates()).add(text)
        if anchor not in self._indexed:
            self._pending.add(anchor)

    def remove(self, text: str) -> None:
        """Drop ``text``, which must be indexed."""
        anchor = text[:ANCHOR_CHARS]
        texts = self._candidates[anchor].texts
        del texts[bisect_left(texts, text)]
        if not texts:
            del self._candidates[anchor]
            self._pending.discard(anchor)

    def find(self, text: str) -> Matches:
        """The leftmost, longest occurrences; at most about ``8 len(text) + 100,000`` steps of comparing."""
        self._update()
        return _Search(text).over(sorted(self._places(text), key=lambda place: place.start))

    def _places(self, text: str) -> Iterator[_Place]:
        for _, automaton in self._levels:
            for last, anchor in automaton.iter(text):
                if candidates := self._candidates.get(anchor):
                    yield _Place(last + 1 - len(anchor), candidates)

    def _update(self) -> None:
        if len(self._indexed) > 2 * len(self._candidates) + 64:
            self._levels.clear()
            self._indexed.clear()
            self._pending = set(self._candidates)
        anchors = self._pending
        if not anchors:
            return
        while self._levels and len(self._levels[-1][0]) <= GROWTH * len(anchors):
            # Dead anchors are dropped at the merge; they may come back later as pending ones.
            merged = self._levels.pop()[0]
            self._indexed -= merged
            anchors = anchors | (merged & self._candidates.keys())
        self._levels.append((frozenset(anchors), _automaton(anchors)))
        self._indexed |= anchors
        self._pending = set()


def _automaton(anchors: Iterable[str]) -> Any:
    automaton = ahocorasick.Automaton()
    for anchor in anchors:
        automaton.add_word(anchor, anchor)
    automaton.make_automaton()
    return automaton
