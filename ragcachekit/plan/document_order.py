"""The order of chunks in their documents: what stands before a chunk is what it is likely to refer to."""

from __future__ import annotations

import threading
from bisect import insort
from collections.abc import Iterable, Sequence
from typing import NamedTuple

NEAR = 4  # chunks on either side


class _Place(NamedTuple):
    start: int  # in characters where the splitter says so, else by arrival
    text: str


class DocumentOrder:
    """Chunks of documents by their start; one namespace. Thread safe.

    A chunk belongs to the document that it was first added with. Adding or removing one document changes no
    neighbour of a chunk of another one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._places: dict[str, list[_Place]] = {}  # by document
        self._at: dict[str, tuple[str, _Place]] = {}  # by text without outer blanks

    def __len__(self) -> int:
        return len(self._at)

    def __contains__(self, text: str) -> bool:
        return text.strip() in self._at

    def add(self, document: str, texts: Sequence[str], starts: Sequence[int] | None = None) -> None:
        """Note chunks of a document; without ``starts`` they follow those that are known already."""
        with self._lock:
            places = self._places.setdefault(document, [])
            after = places[-1].start + 1 if places else 0
            for number, text in enumerate(text.rstrip() for text in texts):
                if not text or text.strip() in self._at:
                    continue
                place = _Place(after + number if starts is None else starts[number], text)
                insort(places, place)
                self._at[text.strip()] = document, place
            if not places:
                del self._places[document]

    def discard(self, texts: Iterable[str]) -> None:
        """Drop chunks, as neighbours too."""
        with self._lock:
            for text in texts:
                document, place = self._at.pop(text.strip(), ("", None))
                if place is not None:
                    self._places[document].remove(place)
                    if not self._places[document]:
                        del self._places[document]

    def of(self, text: str, following: bool = False) -> tuple[str, ...]:
        """The chunks before it, nearest first, then those that follow; none for an unknown text."""
        with self._lock:
            document, place = self._at.get(text.strip(), ("", None))
            if place is None:
                return ()
            places = self._places[document]
            at = places.index(place)
            near = places[max(at - NEAR, 0) : at][::-1] + (places[at + 1 :][:NEAR] if following else [])
            return tuple(one.text for one in near)
