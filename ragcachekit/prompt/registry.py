"""Registered chunks: those the retriever returned or that were encoded."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence

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


class _Namespace:
    def __init__(self, min_chars: int) -> None:
        self.lru: OrderedDict[str, None] = OrderedDict()
        self.index = AnchorIndex(min_chars)

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
    1
    >>> registry.find("acme", "Context: Berlin is the capital of Germany.").found
    (Match(start=9, end=42),)
    """

    def __init__(self, max_chunks: int = DEFAULT_MAX_CHUNKS, min_chars: int = DEFAULT_MIN_CHARS) -> None:
        self.max_chunks = max_chunks
        self.min_chars = min_chars
        self._lock = threading.Lock()
        self._namespaces: dict[str, _Namespace] = {}
        self._refused: set[str] = set()  # namespaces that were given shorter texts

    def add(self, namespace: str, texts: Sequence[str]) -> int:
        """Register chunk texts; known ones count as used now. Returns how many are long enough."""
        taken = [text for text in texts if len(text.strip()) >= self.min_chars]
        with self._lock:
            if len(taken) < len(texts):
                self._refused.add(namespace)
            if taken:
                registered = self._namespaces.setdefault(namespace, _Namespace(self.min_chars))
                for text in taken:
                    registered.put(text, self.max_chunks)
        return len(taken)

    def discard(self, namespace: str, texts: Iterable[str]) -> None:
        """Forget texts and their stripped forms."""
        with self._lock:
            if known := self._namespaces.get(namespace):
                for text in texts:
                    known.drop(text)

    def clear(self, namespace: str) -> None:
        """Forget the whole namespace."""
        with self._lock:
            self._refused.discard(namespace)
            self._namespaces.pop(namespace, None)

    def size(self, namespace: str) -> int:
        """Texts registered in the namespace, all forms counted."""
        with self._lock:
            known = self._namespaces.get(namespace)
            return len(known.lru) if known else 0

    def texts(self, namespace: str) -> list[str]:
        """The registered texts in all forms, the one registered or found last at the end."""
        with self._lock:
            known = self._namespaces.get(namespace)
            return list(known.lru) if known else []

    def nothing_found(self, namespace: str) -> str:
        """Why a prompt has no chunk of the namespace, and what to do."""
        with self._lock:
            refused = namespace in self._refused
        if self.size(namespace):
            why = (
                f"no chunk registered in namespace {namespace!r} stands verbatim in the prompt: cut, in "
                "another case, re-wrapped, or with a word that runs on, a chunk is not recognised; put the "
                "texts into the prompt as they are (LangChain: format_docs), or register what the chain makes"
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
