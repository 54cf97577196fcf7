"""Many texts searched for at once: a dictionary of their first characters, then a bisection."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort

from ragcachekit.prompt.base import Match, Matches, common_length, word_runs_across

_BASE_BUDGET = 100_000
_BUDGET_PER_CHAR = 8
_PART, _PART_OF = 64, 4  # least characters of a text's part, and its least share 1 / 4: headers have less


class _Candidates:
    """The texts that begin with one anchor, sorted."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.longest = 0

    def add(self, text: str) -> None:
        insort(self.texts, text)
        self.longest = max(self.longest, len(text))

    def match(self, prompt: str, start: int, budget: int) -> tuple[int, int, int]:
        """Lengths of the longest text and of the longest part of one that stand at ``start`` (0: none), and
        the budget that is left.
        """
        window, part = prompt[start : start + self.longest], 0
        while window and budget >= 0:
            number = bisect_right(self.texts, window) - 1
            budget -= (len(self.texts).bit_length() + 2) * (1 + (len(window) >> 6))
            if not part and number + 1 < len(self.texts):
                part = _part(self.texts[number + 1], common_length(self.texts[number + 1], window))
            if number < 0:
                break
            # A text that the window begins with is no longer than what it shares with its predecessor.
            length = common_length(self.texts[number], window)
            part = max(part, _part(self.texts[number], length))
            if length < len(self.texts[number]):
                window = window[:length]
            elif word_runs_across(prompt, start + length):
                window = window[: length - 1]
            else:
                return length, part, budget
        return 0, part, budget


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
        found, parts = list[Match](), list[Match]()
        end, budget = 0, _BASE_BUDGET + _BUDGET_PER_CHAR * len(text)
        edges = [at for at, char in enumerate(text) if not char.isalnum()]
        for start in sorted({0, *edges, *(at + 1 for at in edges)}):  # elsewhere a word runs across
            if start < end:
                continue
            candidates = self._candidates.get(text[start : start + self._chars])
            if candidates is None or word_runs_across(text, start):
                continue
            length, part, budget = candidates.match(text, start, budget)
            if budget < 0:
                return Matches(tuple(found), start)
            if length:
                end = start + length
                found.append(Match(start, end))
            elif part:
                parts.append(Match(start, start + part))
        return Matches(tuple(found), parts=tuple(parts))


def _part(text: str, length: int) -> int:
    return length if length >= max(_PART, len(text) // _PART_OF) else 0
