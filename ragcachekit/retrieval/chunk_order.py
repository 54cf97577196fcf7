"""The order of chunks in their documents, as metadata tells it, and which of it the engine has."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ragcachekit.retrieval.documents import DocumentIndex

log = logging.getLogger(__name__)


class Place(NamedTuple):
    """A chunk's document (None: it has no order), its text, and where that starts, as far as known."""

    source: str | None
    text: str
    start: int | None = None


def note_order(engine: Any, namespace: str, chunks: Iterable[Place]) -> None:
    """Give the engine the order of each document's chunks: by their starts, or as given if one is unknown."""
    groups: dict[str, list[Place]] = {}
    for chunk in chunks:
        if chunk.source is not None:
            groups.setdefault(chunk.source, []).append(chunk)
    for source, found in groups.items():
        known = [chunk.start for chunk in found if chunk.start is not None]
        starts = known if len(known) == len(found) else None
        engine.order(source, [chunk.text for chunk in found], starts=starts, namespace=namespace)


class NotedOrder:
    """What of an index was given to an engine in one namespace. Thread safe.

    ``held`` is an index of one's own, or lists the documents of another store by id. ``place`` gives that of
    what it holds, and ``version`` changes with it.
    """

    def __init__(
        self,
        engine: Any,
        namespace: str,
        held: DocumentIndex | Callable[[], Mapping[Any, Any]],
        place: Callable[[Any], Place],
        version: Callable[[], Hashable],
    ) -> None:
        self._engine, self._namespace = engine, namespace
        self._held, self._place, self._version_of = held, place, version
        self._lock = threading.Lock()
        self._version: Hashable = object()
        self._texts: dict[Hashable, str] = {}

    def update(self) -> None:
        """Note what came and what went since the last call; a failing index costs the order, no answer."""
        try:
            with self._lock:
                version = self._version_of()
                if version != self._version:
                    self._follow()
                    self._version = version
        except Exception:
            log.warning("the order of chunks in their documents could not be read", exc_info=True)

    def forget(self, ids: Iterable[Hashable] | None) -> None:
        """Take documents that were deleted or replaced (None: any) out of the order until the next update."""
        with self._lock:
            self._drop([one for one in (self._texts if ids is None else ids) if one in self._texts])
            self._version = object()

    def _drop(self, gone: Iterable[Hashable]) -> None:
        texts = {self._texts.pop(one) for one in gone}
        # Another document with such a text takes its place.
        for one in [one for one, text in self._texts.items() if text in texts]:
            del self._texts[one]
        if texts:
            self._engine.drop_order(sorted(texts), namespace=self._namespace)

    def _follow(self) -> None:
        held = self._held
        present = dict.fromkeys(held.ids if isinstance(held, DocumentIndex) else list(held()))
        gone = [one for one in self._texts if one not in present]
        if not isinstance(held, DocumentIndex):  # there a text may change under its id
            read = {one: place.text for one, place in self._places(list(self._texts))}
            gone += [one for one, text in self._texts.items() if one in present and read.get(one) != text]
        self._drop(gone)
        found = self._places([one for one in present if one not in self._texts])
        note_order(self._engine, self._namespace, [place for _, place in found])
        self._texts |= {one: place.text for one, place in found}

    def _places(self, ids: Sequence[Any]) -> list[tuple[Hashable, Place]]:
        held = self._held
        if isinstance(held, DocumentIndex):
            return [(one.id, self._place(one)) for one in held.get(ids)]
        documents = held()
        return [(one, self._place(documents[one])) for one in ids if one in documents]
