"""Lookup, else search, then insert: the one mechanism of every retriever wrapper."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence, Set
from dataclasses import dataclass, replace
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from numpy.typing import ArrayLike

from ragcachekit.errors import RetrievalError
from ragcachekit.query.base import Entry, QueryCacheStats, ResultId
from ragcachekit.query.proximity import ProximityCache

log = logging.getLogger(__name__)

Document = TypeVar("Document")
Found: TypeAlias = Sequence[tuple[ResultId, Document]]
"""What a search returns: ``(id, document)`` in order of relevance."""

_NO_EPOCH = -1  # in which nothing is inserted
_MOST_LOGGED = 100


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
    """A query cache together with the documents that its entries name.

    Documents are stored by (partition, id) and dropped with the last entry that names them: never more
    than ``capacity * k``. A later search that returns another document under the same id replaces it for
    all entries of the partition. No document crosses a partition.

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
        self._documents: dict[tuple[Hashable, ResultId], Document] = {}
        self._uses: Counter[tuple[Hashable, ResultId]] = Counter()
        self._epoch = 0
        self._logged: set[str] = set()
        self._lock = threading.Lock()  # entries and their documents change together
        self._forgetting = threading.Lock()  # taken before _lock: nothing is handed on while texts go

    @property
    def epoch(self) -> int:
        """Rises whenever something is forgotten."""
        return self._epoch

    def while_current(self, epoch: int, action: Callable[[], object]) -> bool:
        """Run ``action`` if nothing was forgotten since ``epoch``; nothing is until it has ended."""
        with self._forgetting:
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
        hit, documents, epoch, note = None, None, _NO_EPOCH, None
        try:
            with self._lock:
                hit = self._cache.lookup(embedding, partition=partition)
                documents = hit and tuple([self._documents[partition, one] for one in hit.ids])
                epoch = self._epoch
        except Exception as error:
            note = self._note(error)
        lookup_us = (time.perf_counter_ns() - start) / 1e3
        if hit is None or documents is None:
            result: Retrieved[Document] = Retrieved((), False, None, lookup_us, note)
        else:
            result = Retrieved(documents, True, hit.distance, lookup_us)
        return Lookup(result, embedding, partition, epoch)

    def insert(self, asked: Lookup[Document], found: Found[Document]) -> Retrieved[Document]:
        """Insert what a search found, unless something was forgotten meanwhile."""
        result, embedding, partition, epoch = asked
        pairs = tuple(found)
        note = result.note
        try:
            with self._lock:
                if pairs and epoch == self._epoch:
                    ids = tuple([one for one, _ in pairs])
                    # Release first: an entry of before may have left, whose documents were never counted.
                    self._release(self._cache.insert(embedding, ids, partition=partition))
                    for one, document in pairs:
                        self._documents[partition, one] = document
                        self._uses[partition, one] += 1
        except Exception as error:
            note = self._note(error)
        return replace(result, documents=tuple([document for _, document in pairs]), note=note)

    def forget(
        self, *, where: Callable[[Hashable], bool] | None = None, ids: Iterable[ResultId] | None = None
    ) -> int:
        """Drop entries whose partition satisfies ``where`` and that name one of ``ids``; returns how many.

        Either may be left out; with neither all are dropped. Call it when documents change or go.
        """
        named = None if ids is None else frozenset(ids)
        return self._forget(lambda entry: _matches(entry, where, named))

    def clear(self) -> int:
        """Drop all entries and documents; returns the number of entries dropped."""
        return self.forget()

    def forget_texts(self, namespace: str, forgotten: Callable[[str], bool] | None = None) -> int:
        """Drop entries of a namespace with a document whose text is ``forgotten``; all of them with None."""
        with self._forgetting:
            if forgotten is None or self._text is None:
                return self.forget(where=lambda partition: _is_of(partition, namespace))
            with self._lock:
                self._epoch += 1  # what a search of before finds from here on is not inserted
                stored = list(self._documents.items())
            texts = {name: self._text(document) for name, document in stored if _is_of(name[0], namespace)}
            matching = {name for name, text in texts.items() if forgotten(text)}
            return self._forget(lambda entry: any((entry.partition, one) in matching for one in entry.ids))

    def stats(self) -> QueryCacheStats:
        """The cache's counters."""
        return self._cache.stats()

    def __len__(self) -> int:
        """Number of documents stored."""
        return len(self._documents)

    def check(self) -> None:
        """Raise AssertionError if documents and their uses disagree, or the cache with itself."""
        with self._lock:
            self._cache.check()
            assert self._uses.keys() == self._documents.keys(), "a document without uses, or a use of none"
            assert all(count > 0 for count in self._uses.values()), "an unused document is stored"

    def _note(self, error: Exception) -> str:
        """The error as a note; logged once, since an embedder that fails may fail at every question."""
        unusable = isinstance(error, RetrievalError | TypeError)
        note = f"{'the embedding cannot be used' if unusable else 'the query cache failed'}: {error}"
        if note not in self._logged and len(self._logged) < _MOST_LOGGED:
            self._logged.add(note)
            log.warning("%s; searching instead", note, exc_info=None if unusable else error)
        return note

    def _forget(self, where: Callable[[Entry], bool]) -> int:
        with self._lock:
            self._epoch += 1
            left = self._cache.forget(where)
            self._release(left)
            return len(left)

    def _release(self, left: Iterable[Entry]) -> None:
        for partition, ids in left:
            for one in ids:
                name = (partition, one)
                if self._uses[name] > 1:
                    self._uses[name] -= 1
                else:
                    del self._uses[name]
                    self._documents.pop(name, None)


def _is_of(partition: Hashable, namespace: str) -> bool:
    return getattr(partition, "namespace", None) == namespace


def _matches(entry: Entry, where: Callable[[Hashable], bool] | None, named: Set[ResultId] | None) -> bool:
    if where is not None and not where(entry.partition):
        return False
    return named is None or not named.isdisjoint(entry.ids)
