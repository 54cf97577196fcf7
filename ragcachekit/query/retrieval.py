"""Lookup, else search, then insert: the one mechanism of every retriever wrapper."""

from __future__ import annotations

import functools
import itertools
import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from numpy.typing import ArrayLike

from ragcachekit.errors import RetrievalError
from ragcachekit.query.base import Entry, LogOnce, QueryCacheStats, ResultId
from ragcachekit.query.proximity import ProximityCache

log = logging.getLogger(__name__)

Document = TypeVar("Document")
Found: TypeAlias = Sequence[tuple[ResultId, Document]]
"""What a search returns: ``(id, document)`` in order of relevance."""

_NO_EPOCH = -1  # in which nothing is inserted


@dataclass(frozen=True)
class Retrieved(Generic[Document]):
    """Documents in order, and where they came from.

    The documents are the very objects that the search returned; hand out copies. ``distance`` is that of
    the cached query in the metric's unit, None after a search; ``lookup_us`` are microseconds in the
    cache. ``note`` is why the cache could not be asked, if it could not.
    """

    documents: tuple[Document, ...]
    hit: bool
    distance: float | None
    lookup_us: float
    note: str | None = None


class Lookup(NamedTuple, Generic[Document]):
    """A finished lookup: its result, and what an insert after a miss needs."""

    result: Retrieved[Document]
    embedding: ArrayLike
    partition: Hashable
    epoch: int


class CachedRetrieval(Generic[Document]):
    """A query cache together with the documents that were found.

    Documents are stored with the entry of their search and dropped with it: never more than
    ``capacity * k``. No document crosses a partition.

    Errors of lookup and insert are logged, and the search answers. So it does where the cache cannot use
    the embedding (zeros, NaN, another width). The search runs outside all locks. What it found is not
    inserted if :meth:`forget` or :meth:`clear` ran meanwhile, nor if it found nothing (mostly an index that
    is not filled yet).

    Parameters
    ----------
    cache : ProximityCache
        Empty; nothing else may insert into it.
    text : callable, optional
        The text of a document, for :meth:`forget_texts`.
    """

    def __init__(self, cache: ProximityCache, text: Callable[[Document], str] | None = None) -> None:
        self._cache = cache
        self._text = text
        self._numbers = itertools.count()
        self._found: dict[ResultId, Found[Document]] = {}  # by number, which is what the cache stores
        self._epoch = 0
        self._warn = LogOnce(log)
        self._lock = threading.Lock()  # entries, documents and epoch change together

    @property
    def epoch(self) -> int:
        """Rises whenever something is forgotten."""
        return self._epoch

    def while_current(self, epoch: int, action: Callable[[], object]) -> bool:
        """Run ``action`` if nothing was forgotten since ``epoch``; nothing is until it has ended."""
        with self._lock:
            if epoch != self._epoch:
                return False
            action()
            return True

    def get(
        self, embedding: ArrayLike, partition: Hashable, search: Callable[[], Found[Document]]
    ) -> Retrieved[Document]:
        """The documents of a near enough earlier query, else those of ``search()``.

        The search is called on a miss, and where the embedding is of no use. What it raises is passed on.
        """
        asked = self.lookup(embedding, partition)
        return asked.result if asked.result.hit else self.insert(asked, search())

    def lookup(self, embedding: ArrayLike, partition: Hashable) -> Lookup[Document]:
        """Look up; after a miss, search and call :meth:`insert`."""
        start = time.perf_counter_ns()
        result: Retrieved[Document] = Retrieved((), False, None, 0.0)
        epoch = _NO_EPOCH
        try:
            with self._lock:
                hit = self._cache.lookup(embedding, partition=partition)
                if hit is not None:
                    documents = tuple([document for _, document in self._found[hit.ids[0]]])
                    result = Retrieved(documents, True, hit.distance, 0.0)
                epoch = self._epoch
        except Exception as error:
            result = replace(result, note=self._note(error))
        lookup_us = (time.perf_counter_ns() - start) / 1e3
        return Lookup(replace(result, lookup_us=lookup_us), embedding, partition, epoch)

    def insert(self, asked: Lookup[Document], found: Found[Document]) -> Retrieved[Document]:
        """Insert what a search found, unless something was forgotten meanwhile."""
        pairs, note, number = tuple(found), asked.result.note, next(self._numbers)
        try:
            with self._lock:
                if pairs and asked.epoch == self._epoch:
                    self._found[number] = pairs
                    self._drop(self._cache.insert(asked.embedding, (number,), partition=asked.partition))
        except Exception as error:
            self._found.pop(number, None)
            note = self._note(error)
        return replace(asked.result, documents=tuple([document for _, document in pairs]), note=note)

    def forget(
        self, *, where: Callable[[Hashable], bool] | None = None, ids: Iterable[ResultId] | None = None
    ) -> int:
        """Drop entries whose partition satisfies ``where`` and that name one of ``ids``; returns how many.

        Either may be left out; with neither all are dropped. Call it when documents change or go.
        """
        named = None if ids is None else frozenset(ids)

        def goes(partition: Hashable, found: Found[Document]) -> bool:
            here = where is None or where(partition)
            return here and (named is None or any(one in named for one, _ in found))

        return self._forget(goes)

    def clear(self) -> int:
        """Drop all entries and documents; returns the number of entries dropped."""
        return self.forget()

    def forget_texts(self, namespace: str, forgotten: Callable[[str], bool] | None = None) -> int:
        """Drop entries of a namespace with a document whose text is ``forgotten``; all of them with None."""
        text, is_gone = self._text, forgotten and functools.cache(forgotten)  # it may split texts into tokens

        def goes(partition: Hashable, found: Found[Document]) -> bool:
            if getattr(partition, "namespace", None) != namespace:
                return False
            return is_gone is None or text is None or any(is_gone(text(one)) for _, one in found)

        return self._forget(goes)

    def stats(self) -> QueryCacheStats:
        """The cache's counters."""
        return self._cache.stats()

    def _note(self, error: Exception) -> str:
        """The error as a note; logged once, since an embedder that fails may fail at every question."""
        unusable = isinstance(error, RetrievalError | TypeError)
        note = f"{'the embedding cannot be used' if unusable else 'the query cache failed'}: {error}"
        self._warn(f"{note}; searching instead", None if unusable else error)
        return note

    def _forget(self, goes: Callable[[Hashable, Found[Document]], bool]) -> int:
        with self._lock:
            self._epoch += 1  # what a search of before finds from here on is not inserted
            left = self._cache.forget(lambda entry: goes(entry.partition, self._found[entry.ids[0]]))
            self._drop(left)
            return len(left)

    def _drop(self, left: Iterable[Entry]) -> None:
        for entry in left:
            del self._found[entry.ids[0]]
