"""Cached results of indexes that report their changes, and of indexes whose documents can be listed."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

from ragcachekit.json_store import JsonStore
from ragcachekit.query.adaptive import AdaptiveTolerance
from ragcachekit.query.base import Partition
from ragcachekit.query.lookups import Lookup, Retrieved
from ragcachekit.query.partition.objects import Identity
from ragcachekit.query.partition.partitioner import Partitioner
from ragcachekit.query.proximity import ProximityCache
from ragcachekit.query.retrieval import CachedRetrieval
from ragcachekit.query.retrievers.candidates import (
    Candidate,
    IndexChange,
    OwnIndex,
    OwnSearch,
    from_json,
    to_json,
)
from ragcachekit.query.retrievers.noted_order import NotedOrder
from ragcachekit.query.saved import SavedEntries

log = logging.getLogger(__name__)

Document = TypeVar("Document")

_VERSION = "index version"  # up to which its changes were applied


class _Unknown(NamedTuple):
    """Any change, up to a version."""

    version: int
    gone: None = None
    embeddings: None = None


class FollowingCache(CachedRetrieval[Document]):
    """A :class:`CachedRetrieval` that follows the changes of indexes; the base of :class:`RetrieverCache`.

    ``folder`` keeps its entries over a restart.
    """

    partitioner: Partitioner

    def __init__(
        self,
        keys: ProximityCache,
        text: Callable[[Document], str],
        guard: bool,
        folder: Path | None,
        adaptive: AdaptiveTolerance | None,
    ) -> None:
        self._store = None if folder is None else JsonStore(folder)
        saved = None if self._store is None else SavedEntries(self._store, to_json, from_json)
        super().__init__(keys, _text_of(text), guard=guard, saved=saved, adaptive=adaptive)
        self._order: NotedOrder[Any] | None = None
        self._behind = False  # entries on disk that a change should have dropped
        self._followed: WeakKeyDictionary[OwnIndex, Hashable] = WeakKeyDictionary()

    def answer_own(
        self, asked: Lookup[Document], own: OwnSearch[Document], partition: Partition | None
    ) -> Retrieved[Document]:
        """Search an index of one's own, and insert its candidates."""
        candidates = own.search(asked.embedding)
        documents = own.documents(own.nearest(candidates, asked.embedding))
        if self.partitioner.is_unchanged(asked.partition, partition):
            pairs: Any = [(one.record.id, one) for one in candidates]
            self.insert(asked, pairs, radius=own.radius(candidates))
        return replace(asked.result, documents=documents)

    def invalidate_documents(
        self,
        found_by: Callable[[Document], Hashable],
        ids: Iterable[Hashable] | None,
        texts: Iterable[str] | None,
        where: Callable[[Document], bool] | None,
        convert: Callable[[Any, float], Document],
    ) -> int:
        """Forget results with one of these documents; returns how many.

        ``found_by`` gives the id of a document, ``convert`` makes one of what an index of one's own holds.
        Without ``ids``, ``texts`` and ``where`` all results go.
        """
        if ids is None and texts is None and where is None:
            return self.clear()
        named, bare = frozenset(ids or ()), frozenset(text.strip() for text in texts or ())
        text = self._text

        def goes(found: Any) -> bool:
            document = convert(found.record, found.distance) if isinstance(found, Candidate) else found
            if found_by(document) in named or (text is not None and text(found).strip() in bare):
                return True
            return where is not None and where(document)

        return self.invalidate(where=goes)

    def follow(self, index: OwnIndex) -> Hashable:
        """The name of an index that reports its changes, which drop results from now on.

        Results that hold a deleted or replaced document go, and those that a new one may belong to.
        """
        if index not in self._followed:
            this = weakref.ref(self)

            def changed(change: IndexChange) -> None:
                if (cache := this()) is not None:
                    cache._apply(change)

            stop = index.on_change(changed)
            weakref.finalize(self, stop)
            self._followed[index] = Identity(index) if index.path is None else str(index.path)
            if self._store is not None and self._store.get(_VERSION) != index.version:
                self._apply(_Unknown(index.version))  # changed while nobody followed it
        return self._followed[index]

    def follow_order(self, order: NotedOrder[Any] | None) -> None:
        """Give the engine the order of chunks in their documents, now and after changes of the index."""
        self._order = order
        if order is not None:
            order.update()

    @property
    def is_on_disk(self) -> bool:
        """Whether a question may read or write a file."""
        return self._store is not None

    def refresh(self) -> None:
        """Take over what other processes changed in the indexes that are followed."""
        for index in list(self._followed):
            index.refresh()

    def changes_of(self, index: object) -> Hashable:
        """Number of changes of a wrapped index, as far as they can be seen."""
        return self.partitioner.changes_of(index)

    def _apply(self, change: IndexChange) -> None:
        """Drop what a change concerns; where the disk fails, all of it now and at the next change."""
        if self._order is not None:
            self._order.forget(change.gone)
        try:
            if self._behind or change.gone is None or change.embeddings is None:
                self.clear()
            else:
                self.invalidate(ids=change.gone)
                if len(change.embeddings):  # without rows, everything would be dropped
                    self.invalidate_near(change.embeddings)
            if self._store is not None:
                self._store.put({_VERSION: change.version})
            self._behind = False
        except OSError:
            self._behind = True
            log.warning("a change of the index could not be applied to the saved questions", exc_info=True)
            with suppress(OSError):  # memory is emptied first
                self.clear()


def _text_of(text: Callable[[Document], str]) -> Callable[[Any], str]:
    return lambda found: found.text if isinstance(found, Candidate) else text(found)
