"""Chunks that were registered together: the neighbours of ``average:n`` where no others are given."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from itertools import pairwise

BLOCK = 4  # chunks of one block
REMEMBERED = 65_536  # chunks per namespace


class Companions:
    """For each chunk the others of its block, in the first list that it was registered in; thread safe.

    A list is what a retriever found for one question, or what :meth:`RagCache.encode` was given. It is cut
    into blocks of at most :data:`BLOCK` chunks; those of one block stand behind each other, and share the
    forwards that encode them. The least recently registered chunks are dropped first. Blanks at the end of a
    text do not count; those at its beginning are part of the chunk, and of its id.

    ``name_of`` gives the chunk id of a text in a namespace. It is asked once per text: it tokenises, and a
    forget must not wait for that.
    """

    def __init__(self, name_of: Callable[[str, str], str]) -> None:
        self._lock, self._name_of = threading.Lock(), name_of
        self._near: dict[str, OrderedDict[str, tuple[str, ...]]] = {}
        self._names: dict[str, dict[str, str]] = {}

    def observe(self, namespace: str, texts: Sequence[str]) -> None:
        """Note a list of chunks, in the order of a document or of a search."""
        unique = list(dict.fromkeys(text.rstrip() for text in texts))
        known = self._names.get(namespace, {})
        named = {text: self._name_of(text, namespace) for text in unique if text not in known}
        with self._lock:
            self._names.setdefault(namespace, {}).update(named)
            near = self._near.setdefault(namespace, OrderedDict())
            new = [text for text in unique if not near.get(text)]
            for block in _blocks(new if len(new) > 1 else [*new, *(t for t in unique if t not in new)]):
                for at, text in enumerate(block):
                    near[text] = near.get(text) or (*block[at + 1 :], *block[:at])
            for text in unique:
                near.move_to_end(text)
            # A longer list is encoded after all of it was noted.
            while len(near) > max(REMEMBERED, len(unique)):
                near.popitem(last=False)
            if len(self._names[namespace]) > 4 * max(REMEMBERED, len(unique)):
                used = {*near, *(text for found in near.values() for text in found)}
                names = self._names[namespace]
                self._names[namespace] = {text: name for text, name in names.items() if text in used}

    def of(self, namespace: str, text: str) -> tuple[str, ...]:
        """The other chunks of its block, those that follow it first."""
        with self._lock:
            near = self._near.get(namespace)
            return near.get(text.rstrip(), ()) if near is not None else ()

    def forget(self, namespace: str, ids: Collection[str] | None) -> None:
        """Drop chunks by their ids (None: all) from the namespace, as companions too."""
        with self._lock:
            if ids is None:
                self._near.pop(namespace, None)
                self._names.pop(namespace, None)
                return
            names = self._names.get(namespace, {})
            gone = {text for text, name in names.items() if name in ids}
            near = self._near.get(namespace, OrderedDict())
            kept = ((text, _without(found, gone)) for text, found in near.items() if text not in gone)
            self._near[namespace] = OrderedDict(kept)
            self._names[namespace] = {text: name for text, name in names.items() if text not in gone}


def _blocks(texts: Sequence[str]) -> list[Sequence[str]]:
    """Blocks of nearly equal size."""
    count = -(-len(texts) // BLOCK)
    cuts = [len(texts) * number // count for number in range(count + 1)] if count else [0]
    return [texts[start:stop] for start, stop in pairwise(cuts)]


def _without(texts: Sequence[str], gone: Collection[str]) -> tuple[str, ...]:
    return tuple(text for text in texts if text not in gone)
