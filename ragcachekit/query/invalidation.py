"""Dropping cached results when documents change, so that none is returned after that."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from ragcachekit.query.base import Entry, QueryCacheStats, ResultId
from ragcachekit.query.entries import Entries
from ragcachekit.query.lookups import Held

Document = TypeVar("Document")


class RevocableEntries(Generic[Document]):
    """Entries that can be invalidated by what changed; the base of :class:`CachedRetrieval`. Thread safe."""

    def __init__(self, entries: Entries[Document], text: Callable[[Document], str] | None) -> None:
        self._entries, self._text = entries, text
        self._epoch = 0
        self._lock = threading.Lock()  # entries, documents and epoch change together
        with self._lock:
            self._take_over(now=True)

    @property
    def epoch(self) -> int:
        """Rises whenever something is invalidated."""
        return self._epoch

    def while_current(self, epoch: int, action: Callable[[], object]) -> bool:
        """Run ``action`` if nothing was invalidated since ``epoch``; nothing is until it has ended."""
        with self._lock:
            if epoch != self._epoch:
                return False
            action()
            return True

    def invalidate(
        self,
        *,
        ids: Iterable[ResultId] | None = None,
        texts: Iterable[str] | None = None,
        where: Callable[[Document], bool] | None = None,
        partition: Callable[[Hashable], bool] | None = None,
    ) -> int:
        """Drop entries of certain partitions that hold one of certain documents; returns how many.

        A document counts if its id is among ``ids``, its text among ``texts``, or ``where`` is true for it;
        with none of these every entry does. Call it when documents change or go. TypeError for one string
        instead of several, or for ``texts`` without ``text``; OSError if other processes cannot be told.
        """
        if isinstance(ids, str) or isinstance(texts, str):
            raise TypeError("ids and texts must be collections, not one string; put it into a list")
        if texts is not None and self._text is None:
            raise TypeError("texts can be compared only if the CachedRetrieval was given text=")
        named, gone, text = frozenset(ids or ()), frozenset(texts or ()), self._text
        everything = ids is None and texts is None and where is None

        def counts(one: ResultId, document: Document) -> bool:
            of_text = text is not None and bool(gone) and text(document) in gone
            return one in named or of_text or (where is not None and where(document))

        def goes(entry: Entry, held: Held[Document]) -> bool:
            here = partition is None or partition(entry.partition)
            return here and (everything or any(counts(*pair) for pair in held.found))

        return self._invalidate(lambda entries: entries.drop_entries(goes))

    def invalidate_near(self, embeddings: ArrayLike) -> int:
        """Drop entries into whose results a new document may belong; returns how many.

        ``embeddings`` ``[m, dim]`` are those of the new documents. An entry goes if one of these is
        within the radius given to :meth:`insert`, and always if it has no radius or fewer than k results.
        Embeddings of another width, or without rows, drop everything. OSError as for :meth:`invalidate`.
        """
        added = np.atleast_2d(np.asarray(embeddings, np.float64))

        def drop(entries: Entries[Document]) -> int:
            numbers = entries.reached(added)
            return entries.drop(lambda number, _: number in numbers)

        return self._invalidate(drop)

    def clear(self) -> int:
        """Drop all entries and documents; returns the number of entries dropped."""
        return self.invalidate()

    def forget_texts(self, namespace: str, forgotten: Callable[[str], bool] | None = None) -> int:
        """Drop entries of a namespace with a document whose text is ``forgotten``; with None, all."""
        text, is_gone = self._text, forgotten and functools.cache(forgotten)  # it may split texts into tokens

        def goes(entry: Entry, held: Held[Document]) -> bool:
            if getattr(entry.partition, "namespace", None) != namespace:
                return False
            return is_gone is None or text is None or any(is_gone(text(one)) for _, one in held.found)

        return self._invalidate(lambda entries: entries.drop_entries(goes))

    def stats(self) -> QueryCacheStats:
        """The cache's counters."""
        return self._entries.cache.stats()

    def _take_over(self, *, now: bool = False) -> None:
        if self._entries.take_over(now=now):
            self._epoch += 1

    def _invalidate(self, drop: Callable[[Entries[Document]], int]) -> int:
        with self._lock:
            self._epoch += 1  # what a search of before finds from here on is not inserted
            try:
                self._entries.begin_invalidation()
            except OSError:
                drop(self._entries)
                raise
            return drop(self._entries)
