"""Many texts searched for at once: a dictionary of their first characters, then a bisection."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort

from ragcachekit.prompt.base import Match, Matches, common_length, word_runs_across

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

    def match(self, prompt: str, start: int, budget: int) -> tuple[int, int]:
        """Length of the longest text that stands at ``start`` (0: none), and the budget that is left."""
        window = prompt[start : start + self.longest]
        while window and budget >= 0:
            number = bisect_right(self.texts, window) - 1
            budget -= (len(self.texts).bit_length() + 1) * (1 + (len(window) >> 6))
            if number < 0:
                break
            # A text that the window begins with is no longer than what it shares with its predecessor.
            length = common_length(self.texts[number], window)
            if length < len(self.texts[number]):
                window = window[:length]
            elif word_runs_across(prompt, start + length):
                window = window[: length - 1]
            else:
                return length, budget
        return 0, budget


class AnchorIndex:
    """A set of texts that can be searched for all at once; each has at least ``chars`` characters.

    An anchor is the first ``chars`` characters of a text. Not thread safe.
    """

    def __init__(self, chars: int) -> None:
        self._chars = chars
        self._candidates: dict[str, _Candidates] = {}

    def add(self, text: str) -> None:
        """Index ``text``, which must not be indexed already."""
        self._candidates.setdefault(text[: self._chars], _Candidates()).add(text)

    def remove(self, text: str) -> None:
        """Drop ``text``, which must be indexed."""
        anchor = text[: self._chars]
        texts = self._candidates[anchor].texts
        del texts[bisect_left(texts, text)]
        if not texts:
            del self._candidates[anchor]

    def find(self, text: str) -> Matches:
        """The leftmost, longest occurrences; at most about ``8 len(text) + 100,000`` steps of comparing.

        A step compares up to 64 characters.
        """
        found: list[Match] = []
        end, budget = 0, _BASE_BUDGET + _BUDGET_PER_CHAR * len(text)
        edges = [at for at, char in enumerate(text) if not char.isalnum()]
        for start in sorted({0, *edges, *(at + 1 for at in edges)}):  # elsewhere a word runs across
            if start < end:
                continue
            candidates = self._candidates.get(text[start : start + self._chars])
            if candidates is None or word_runs_across(text, start):
                continue
            length, budget = candidates.match(text, start, budget)
            if budget < 0:
                return Matches(tuple(found), start)
            if length:
                end = start + length
                found.append(Match(start, end))
        return Matches(tuple(found))
