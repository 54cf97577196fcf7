"""Texts that begin alike, found in a logarithmic number of comparisons."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator


class NestedTexts:
    """Sorted texts, each with the longest other one that it begins with. Never changes.

    All texts that a place begins with are then in one chain. Jumps over the chain (the skew-binary ones
    of Myers' applicative random-access stack) find a length in it in logarithmic time.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = ["", *sorted(texts)]
        self._longest = max(map(len, self._texts))
        count = len(self._texts)
        self._parent, self._jump, depth = [0] * count, [0] * count, [0] * count
        chain = [0]
        for number, text in enumerate(self._texts[1:], 1):
            while not text.startswith(self._texts[chain[-1]]):
                chain.pop()
            parent = chain[-1]
            jump = self._jump[parent]
            even = depth[parent] - depth[jump] == depth[jump] - depth[self._jump[jump]]
            self._parent[number] = parent
            self._jump[number] = self._jump[jump] if even else parent
            depth[number] = depth[parent] + 1
            chain.append(number)

    def prefixes(self, text: str, start: int) -> tuple[Iterator[int], int]:
        """Lengths of all that ``text[start:]`` begins with, longest first, and the steps of comparing."""
        window = text[start : start + self._longest]
        number = bisect_right(self._texts, window) - 1
        common = common_length(self._texts[number], window)
        steps = (len(self._texts).bit_length() + 2) * (1 + (len(window) >> 6))
        while len(self._texts[number]) > common:
            jump = self._jump[number]
            number = jump if len(self._texts[jump]) > common else self._parent[number]
            steps += 1
        return self._chain(number), steps

    def _chain(self, number: int) -> Iterator[int]:
        while number:
            yield len(self._texts[number])
            number = self._parent[number]


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
