"""Index of token sequences by their longest beginning in common with another one."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence

import numpy as np

_ITEM = array("q").itemsize


def packed(token_ids: Sequence[int]) -> bytes:
    """Sequence as :class:`LongestPrefixes` takes it: eight bytes per token."""
    return array("q", token_ids).tobytes()


def common(one: bytes, other: bytes) -> int:
    """Length of the longest common beginning of two packed sequences, in tokens."""
    least = min(len(one), len(other)) // _ITEM
    differ = np.frombuffer(one, np.int64, least) != np.frombuffer(other, np.int64, least)
    first = int(differ.argmax()) if least else 0
    return first if least and differ[first] else least


class LongestPrefixes:
    """Packed sequences, sorted by their bytes, each with a number.

    Sequences with the same beginning are adjacent in that order: a look-up compares some 14 of 10,000. Not
    thread safe.
    """

    def __init__(self) -> None:
        self._known: list[bytes] = []
        self._numbers = array("q")

    def __len__(self) -> int:
        return len(self._known)

    def longest(self, asked: bytes) -> tuple[int, int]:
        """Tokens of ``asked`` that are known, and the highest number of the sequences with them.

        There must be a sequence.
        """
        at = bisect_left(self._known, asked)
        tokens = max(common(known, asked) for known in self._known[max(0, at - 1) : at + 1])
        shared = asked[: tokens * _ITEM]
        start = bisect_left(self._known, shared)
        stop = bisect_right(self._known, shared, start, key=lambda known: known[: len(shared)])
        return tokens, int(np.frombuffer(self._numbers, np.int64, stop - start, start * _ITEM).max())

    def begun_by(self, longer: bytes) -> Iterator[int]:
        """Numbers of the sequences that begin ``longer``, itself included, the longest first."""
        at = bisect_right(self._known, longer)
        while at:
            known = self._known[at - 1]
            # The remaining ones sort before this one, so they begin this one, too.
            shared = common(known, longer) * _ITEM
            if shared == len(known):
                yield self._numbers[at - 1]
                at -= 1
            else:
                at = bisect_right(self._known, longer[:shared], 0, at - 1)

    def add(self, sequence: bytes, number: int) -> None:
        """Add a new sequence."""
        at = bisect_left(self._known, sequence)
        self._known.insert(at, sequence)
        self._numbers.insert(at, number)

    def remove(self, sequence: bytes) -> None:
        """Remove a known sequence."""
        at = bisect_left(self._known, sequence)
        del self._known[at], self._numbers[at]
