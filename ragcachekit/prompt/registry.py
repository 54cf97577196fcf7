"""Registered chunks (those that a retriever returned or that were encoded), and the search for them."""

from __future__ import annotations

import threading
import unicodedata
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

_BASE_BUDGET, _BUDGET_PER_CHAR = 100_000, 8
_JOINER = "\u200d"


class Match(NamedTuple):
    """One occurrence of a registered chunk: ``text[start:end]`` is the chunk's text."""

    start: int
    end: int


class Matches(NamedTuple):
    """Occurrences from left to right; ``searched`` is how many characters were, if not the whole text."""

    found: tuple[Match, ...]
    searched: int | None = None


def forms(text: str) -> tuple[str, ...]:
    """Forms under which a chunk text is searched for: itself, then itself without outer whitespace.

    Chains and templates may strip documents. The longest form that a prompt has is the one found.
    """
    stripped = text.strip()
    return (text,) if stripped == text else (text, stripped)


class ChunkRegistry:
    """Registered chunk texts per namespace, all found in one pass over a prompt. Thread safe.

    Namespaces are separate indexes. A full one evicts the chunk that was neither registered nor found for
    longest. The time of a search is linear in the prompt; one that would take longer ends early.

    ``max_chunks`` is the limit per namespace (a text with outer whitespace counts twice, see :func:`forms`),
    ``min_chars`` the shortest text registered, outer whitespace aside: shorter ones are found everywhere.
    """

    def __init__(self, max_chunks: int = 100_000, min_chars: int = 16) -> None:
        self.max_chunks, self.min_chars = max_chunks, min_chars
        self._lock = threading.Lock()
        self._namespaces: dict[str, _Namespace] = {}

    def add(self, namespace: str, texts: Sequence[str]) -> int:
        """Register chunk texts; known ones count as used now. Returns how many are long enough."""
        taken = [text for text in texts if len(text.strip()) >= self.min_chars]
        if taken:
            with self._lock:
                registered = self._namespaces.setdefault(namespace, _Namespace(self.min_chars))
                for text in taken:
                    registered.put(text, self.max_chunks)
        return len(taken)

    def forget(self, namespace: str, texts: Iterable[str] | None) -> None:
        """Forget texts and their stripped forms; with None, the whole namespace."""
        with self._lock:
            if texts is None:
                self._namespaces.pop(namespace, None)
            elif known := self._namespaces.get(namespace):
                for text in texts:
                    known.drop(text)

    def texts(self, namespace: str) -> list[str]:
        """The registered texts in all forms, the one registered or found last at the end."""
        with self._lock:
            known = self._namespaces.get(namespace)
            return list(known.lru) if known else []

    def find(self, namespace: str, text: str) -> Matches:
        """The leftmost, longest occurrences of the namespace's chunks; these count as used just now."""
        with self._lock:
            known = self._namespaces.get(namespace)
            if known is None:
                return Matches(())
            matches = known.index.find(text)
            for start, end in matches.found:
                for form in reversed(forms(text[start:end])):
                    if form in known.lru:
                        known.lru.move_to_end(form)
        return matches

    def nothing_found(self, namespace: str) -> str:
        """Why a prompt has no chunk of the namespace, and what to do."""
        if self.texts(namespace):
            return (
                f"no chunk registered in namespace {namespace!r} occurs verbatim in the prompt: cut, in "
                "another case, re-wrapped, or with a word that runs on, a chunk is not recognised; put the "
                "texts into the prompt as they are (LangChain: format_docs), or register what the chain makes"
            )
        return (
            f"no chunk is registered in namespace {namespace!r}: wrap the retriever, give the texts to "
            f"encode or register, or mark the chunks in the prompt (any below {self.min_chars} characters)"
        )


class _Namespace:
    def __init__(self, min_chars: int) -> None:
        self.lru: OrderedDict[str, None] = OrderedDict()
        self.index = _AnchorIndex(min_chars)

    def put(self, text: str, limit: int) -> None:
        if text in self.lru:
            self.lru.move_to_end(text)  # or the insert of its stripped form could evict it
        for form in reversed(forms(text)):  # the stripped form first, so that it is evicted first
            if form not in self.lru:
                self.index.add(form)
            self.lru[form] = None
            self.lru.move_to_end(form)
            if len(self.lru) > limit:
                self.index.remove(self.lru.popitem(last=False)[0])

    def drop(self, text: str) -> None:
        for form in forms(text):
            if form in self.lru:
                del self.lru[form]
                self.index.remove(form)


class _AnchorIndex:
    """Texts that are searched for all at once: a dictionary of their first characters, then a bisection."""

    def __init__(self, chars: int) -> None:
        self._chars = chars
        self._texts: dict[str, list[str]] = {}  # by anchor, sorted
        self._longest: dict[str, int] = {}

    def add(self, text: str) -> None:
        anchor = text[: self._chars]
        insort(self._texts.setdefault(anchor, []), text)
        self._longest[anchor] = max(self._longest.get(anchor, 0), len(text))

    def remove(self, text: str) -> None:
        anchor = text[: self._chars]
        texts = self._texts[anchor]
        del texts[bisect_left(texts, text)]
        if not texts:
            del self._texts[anchor], self._longest[anchor]

    def find(self, text: str) -> Matches:
        """The leftmost, longest occurrences; at most about ``8 len(text) + 100,000`` comparisons.

        A comparison reads up to 64 characters.
        """
        found, end, budget = list[Match](), 0, _BASE_BUDGET + _BUDGET_PER_CHAR * len(text)
        edges = [at for at, char in enumerate(text) if not char.isalnum()]
        for start in sorted({0, *edges, *(at + 1 for at in edges)}):  # all others are inside a word
            anchor = text[start : start + self._chars]
            if start < end or anchor not in self._texts or is_inside_word(text, start):
                continue
            length, budget = self._match(text, start, anchor, budget)
            if budget < 0:
                return Matches(tuple(found), start)
            if length:
                end = start + length
                found.append(Match(start, end))
        return Matches(tuple(found))

    def _match(self, prompt: str, start: int, anchor: str, budget: int) -> tuple[int, int]:
        """Length of the longest text at ``start``, and the budget left."""
        texts, window = self._texts[anchor], prompt[start : start + self._longest[anchor]]
        while window and budget >= 0:
            number = bisect_right(texts, window) - 1
            budget -= (len(texts).bit_length() + 2) * (1 + (len(window) >> 6))
            if number < 0:
                break
            # A text that the window begins with is no longer than what it shares with its predecessor.
            length = common_length(texts[number], window)
            if length < len(texts[number]):
                window = window[:length]
            elif is_inside_word(prompt, start + length):
                window = window[: length - 1]
            else:
                return length, budget
        return 0, budget


def is_inside_word(text: str, edge: int) -> bool:
    """Whether the position ``edge`` is inside a word, or between a character and its marks."""
    if edge <= 0 or edge >= len(text):
        return False
    left, right = text[edge - 1], text[edge]
    if _JOINER in (left, right) or _is_mark(right):
        return True
    return (left.isalnum() or _is_mark(left)) and right.isalnum()


def _is_mark(char: str) -> bool:
    return char > "\u02ff" and unicodedata.category(char)[0] == "M"


def common_length(one: Sequence[object], other: Sequence[object]) -> int:
    """Length of the common beginning, by bisection: comparing slices takes no loop over characters."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
