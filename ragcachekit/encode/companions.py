"""Chunks that were registered together: the neighbours of ``average:n`` where no others are given."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence

MOST = 8  # companions of one chunk
REMEMBERED = 65_536  # chunks per namespace


class Companions:
    """For each chunk, those nearest to it in the first lists that it was registered in; thread safe.

    A list is what a retriever found for one question, or what :meth:`RagCache.encode` was given. A chunk
    takes companions until it has :data:`MOST`; the least recently registered chunks are dropped first.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._near: dict[str, OrderedDict[str, tuple[str, ...]]] = {}

    def observe(self, namespace: str, texts: Sequence[str]) -> None:
        """Note a list of chunks, in the order of a document or of a search."""
        unique = list(dict.fromkeys(text.strip() for text in texts))
        with self._lock:
            near = self._near.setdefault(namespace, OrderedDict())
            for at, text in enumerate(unique):
                known = near.get(text, ())
                if len(known) < MOST:
                    near[text] = tuple(dict.fromkeys((*known, *around(unique, at))))[:MOST]
                near.move_to_end(text)
            while len(near) > REMEMBERED:
                near.popitem(last=False)

    def of(self, namespace: str, text: str) -> tuple[str, ...]:
        """Companions of a chunk, the first ones first."""
        with self._lock:
            return self._near.get(namespace, {}).get(text.strip(), ())

    def forget(self, namespace: str, is_forgotten: Callable[[str], bool] | None) -> None:
        """Drop chunks (None: all) from the namespace, as companions too."""
        with self._lock:
            if is_forgotten is None:
                self._near.pop(namespace, None)
                return
            near = self._near.get(namespace, OrderedDict())
            gone = {
                text for text in {*near, *(n for found in near.values() for n in found)} if is_forgotten(text)
            }
            kept = ((text, _without(found, gone)) for text, found in near.items() if text not in gone)
            self._near[namespace] = OrderedDict(kept)


def around(texts: Sequence[str], at: int) -> list[str]:
    """At most 2 x :data:`MOST` texts nearest to place ``at``, the earlier of two equally near."""
    order = (place for step in range(1, MOST + 1) for place in (at - step, at + step))
    return [texts[place] for place in order if 0 <= place < len(texts)]


def _without(texts: Sequence[str], gone: Collection[str]) -> tuple[str, ...]:
    return tuple(text for text in texts if text not in gone)
