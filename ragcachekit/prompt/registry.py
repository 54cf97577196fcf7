"""Registered chunks: those the retriever returned or that were encoded."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from ragcachekit.prompt.anchors import AnchorIndex
from ragcachekit.prompt.base import Matches

DEFAULT_MAX_CHUNKS = 100_000
DEFAULT_MIN_CHARS = 16


def forms(text: str) -> tuple[str, ...]:
    """Forms under which a chunk text is searched for: itself, then itself without outer whitespace.

    Chains and templates may strip documents. The longest form that a prompt has is the one found.
    """
    stripped = text.strip()
    return (text,) if stripped == text else (text, stripped)


@dataclass(frozen=True)
class Registered:
    """Numbers of new and of known texts, and those ``refused``: shorter than ``min_chars``."""

    added: int
    known: int
    refused: tuple[str, ...]


class _Namespace:
    def __init__(self) -> None:
        self.lru: OrderedDict[str, None] = OrderedDict()
        self.index = AnchorIndex()

    def put(self, text: str, limit: int) -> bool:
        new = text not in self.lru
        if not new:
            self.lru.move_to_end(text)  # or the insert of its stripped form could evict it
        for form in reversed(forms(text)):  # the stripped form first, so that it is evicted first
            if form not in self.lru:
                self.index.add(form)
            self.lru[form] = None
            self.lru.move_to_end(form)
            if len(self.lru) > limit:
                self.index.remove(self.lru.popitem(last=False)[0])
        return new

    def drop(self, text: str) -> bool:
        known = text in self.lru
        for form in forms(text):
            if form in self.lru:
                del self.lru[form]
                self.index.remove(form)
        return known


class ChunkRegistry:
    """Registered chunk texts per namespace, all found in one pass over a prompt. Thread safe.

    Namespaces are separate indexes: a text registered by one tenant is never found in another
    tenant's prompt. A full namespace evicts the chunk that was neither registered nor found for longest.
    The time of a search is linear in the prompt; one that would take longer ends before and reports where.

    ``max_chunks`` is the limit per namespace (a text with outer whitespace counts twice, see :func:`forms`),
    ``min_chars`` the shortest text registered, outer whitespace aside: shorter ones are found everywhere.

    Examples
    --------
    >>> registry = ChunkRegistry()
    >>> registry.add("acme", ["Berlin is the capital of Germany.", "Berlin"])
    Registered(added=1, known=0, refused=('Berlin',))
    >>> registry.find("acme", "Context: Berlin is the capital of Germany.").found
    (Match(start=9, end=42),)
    """

    def __init__(self, max_chunks: int = DEFAULT_MAX_CHUNKS, min_chars: int = DEFAULT_MIN_CHARS) -> None:
        if max_chunks < 2:
            raise ValueError(f"max_chunks must be >= 2 (a text and its stripped form), got {max_chunks}")
        if min_chars < 1:
            raise ValueError(f"min_chars must be >= 1, got {min_chars}")
        self.max_chunks = max_chunks
        self.min_chars = min_chars
        self._lock = threading.Lock()
        self._namespaces: dict[str, _Namespace] = {}
        self._refused: set[str] = set()

    def add(self, namespace: str, texts: Iterable[str]) -> Registered:
        """Register chunk texts; known ones count as used now. TypeError for what is no list of strings."""
        wanted = _strings(texts)
        refused = tuple(text for text in wanted if len(text.strip()) < self.min_chars)
        taken = [text for text in wanted if len(text.strip()) >= self.min_chars]
        with self._lock:
            if refused:
                self._refused.add(namespace)
            if not taken:
                return Registered(0, 0, refused)
            registered = self._namespaces.setdefault(namespace, _Namespace())
            added = sum(registered.put(text, self.max_chunks) for text in taken)
        return Registered(added, len(taken) - added, refused)

    def discard(self, namespace: str, texts: Iterable[str]) -> int:
        """Forget texts and their stripped forms; returns how many of ``texts`` were registered."""
        wanted = _strings(texts)
        with self._lock:
            known = self._namespaces.get(namespace)
            return sum(known.drop(text) for text in wanted) if known else 0

    def clear(self, namespace: str) -> int:
        """Forget the whole namespace; returns how many texts (all forms) it held."""
        with self._lock:
            self._refused.discard(namespace)
            known = self._namespaces.pop(namespace, None)
            return len(known.lru) if known else 0

    def size(self, namespace: str) -> int:
        """Texts registered in the namespace, all forms counted."""
        with self._lock:
            known = self._namespaces.get(namespace)
            return len(known.lru) if known else 0

    def nothing_found(self, namespace: str) -> str:
        """Why a prompt has no chunk of the namespace, and what to do."""
        with self._lock:
            refused = namespace in self._refused
        if self.size(namespace):
            why = (
                f"no chunk registered in namespace {namespace!r} stands verbatim in the prompt: cut, in "
                "another case, re-wrapped, or with a word that runs on, a chunk is not recognised"
            )
        else:
            why = (
                f"no chunk is registered in namespace {namespace!r}: wrap the retriever, give the texts to "
                "encode or register, or mark the chunks in the prompt"
            )
        short = f"; texts shorter than {self.min_chars} characters were not registered, mark those"
        return why + (short if refused else "")

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


def _strings(texts: Iterable[str]) -> list[str]:
    if isinstance(texts, str):
        raise TypeError("texts must be a list of strings, not one string")
    wanted = list(texts)
    for text in wanted:
        if not isinstance(text, str):
            raise TypeError(f"a chunk text must be str, not {type(text).__name__}")
    return wanted
