"""Lookup, else search, then insert: the one mechanism behind every retriever wrapper."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

from numpy.typing import ArrayLike

from ragcachekit.errors import RetrievalError
from ragcachekit.query.base import Entry, Hit, QueryCache, QueryCacheStats, ResultId

log = logging.getLogger(__name__)

Document = TypeVar("Document")
Found: TypeAlias = Sequence[tuple[ResultId, Document]]
"""What a search returns: ``(id, document)`` in order of relevance."""


_NEVER = -1  # an epoch in which nothing is kept


@dataclass(frozen=True)
class Retrieved(Generic[Document]):
    """Documents in order, and where they came from.

    Attributes
    ----------
    documents : tuple
        The very objects that the search returned; hand out copies.
    hit : bool
        True if no search was made.
    distance : float or None
        Of the cached query, in the unit of the cache's metric; None after a search.
    lookup_us : float
        Microseconds spent in the cache before the search, or instead of it.
    """

    documents: tuple[Document, ...]
    hit: bool
    distance: float | None
    lookup_us: float


class CachedRetrieval(Generic[Document]):
    """A query cache together with the documents that its entries name.

    Documents are kept by (partition, id), counted by the entries that name them, and dropped with the
    last one: never more than ``capacity * k``. A later search that returns another document under the
    same id replaces it for all entries of the partition. No document crosses a partition.

    A cache that fails is not the end of a question: whatever lookup or insert raise, other than for a
    bad embedding or partition, is logged, and the search answers.

    The search runs outside all locks; two threads that miss at once both search. What a search found
    is not kept if :meth:`forget` or :meth:`clear` ran meanwhile (it may hold what was to be
    forgotten), nor if it found nothing (mostly an index that is not filled yet).

    Parameters
    ----------
    cache : QueryCache
        Owned by this object from now on: insert into it through nothing else.
    """

    def __init__(self, cache: QueryCache) -> None:
        self._cache = cache
        self._documents: dict[tuple[Hashable, ResultId], Document] = {}
        self._uses: Counter[tuple[Hashable, ResultId]] = Counter()
        self._epoch = 0
        self._lock = threading.Lock()  # entries and their documents change together

    def get(
        self, embedding: ArrayLike, partition: Hashable, search: Callable[[], Found[Document]]
    ) -> Retrieved[Document]:
        """The documents of a near enough earlier query, else those of ``search()``.

        Raises
        ------
        RetrievalError
            The embedding holds NaN or infinity, or has another width than before; nothing is
            searched. Whatever ``search`` raises is passed on, and nothing is kept.
        """
        cached, epoch = self._lookup(embedding, partition)
        if cached.hit:
            return cached
        return self._keep(embedding, partition, search(), epoch, cached.lookup_us)

    async def aget(
        self,
        embedding: ArrayLike,
        partition: Hashable,
        search: Callable[[], Awaitable[Found[Document]]],
    ) -> Retrieved[Document]:
        """:meth:`get` with a search that is awaited."""
        cached, epoch = self._lookup(embedding, partition)
        if cached.hit:
            return cached
        return self._keep(embedding, partition, await search(), epoch, cached.lookup_us)

    def forget(
        self, *, where: Callable[[Hashable], bool] | None = None, ids: Iterable[ResultId] | None = None
    ) -> int:
        """Drop entries whose partition satisfies ``where`` and that name one of ``ids``.

        Either may be left out; with neither all are dropped. Call it when documents change or go.

        Returns
        -------
        int
            The number of entries dropped.
        """
        named = None if ids is None else frozenset(ids)
        return self._forget(lambda entry: _matches(entry, where, named))

    def clear(self) -> int:
        """Drop all entries and documents; returns the number of entries dropped."""
        return self._forget(lambda _: True)

    def stats(self) -> QueryCacheStats:
        """The cache's counters."""
        return self._cache.stats()

    def __len__(self) -> int:
        """Number of documents kept."""
        return len(self._documents)

    def check(self) -> None:
        """Raise AssertionError if documents and their uses disagree, or the cache with itself."""
        with self._lock:
            self._cache.check()
            assert self._uses.keys() == self._documents.keys(), "a document without uses, or a use of none"
            assert all(count > 0 for count in self._uses.values()), "an unused document is kept"

    def _lookup(self, embedding: ArrayLike, partition: Hashable) -> tuple[Retrieved[Document], int]:
        start = time.perf_counter_ns()
        hit, documents, epoch = None, None, _NEVER
        try:
            with self._lock:
                hit = self._cache.lookup(embedding, partition=partition)
                documents = self._fetch(hit, partition)
                epoch = self._epoch
        except (RetrievalError, TypeError):
            raise
        except Exception:
            log.warning("the query cache failed at a lookup, searching instead", exc_info=True)
        lookup_us = (time.perf_counter_ns() - start) / 1e3
        if hit is None or documents is None:
            return Retrieved((), False, None, lookup_us), epoch
        return Retrieved(documents, True, hit.distance, lookup_us), epoch

    def _fetch(self, hit: Hit | None, partition: Hashable) -> tuple[Document, ...] | None:
        if hit is None:
            return None
        try:
            return tuple([self._documents[partition, one] for one in hit.ids])
        except KeyError:  # an entry that was in the cache before it was handed over: a miss
            return None

    def _keep(
        self,
        embedding: ArrayLike,
        partition: Hashable,
        found: Found[Document],
        epoch: int,
        lookup_us: float,
    ) -> Retrieved[Document]:
        pairs = tuple(found)
        ids = tuple([one for one, _ in pairs])
        documents = tuple([document for _, document in pairs])
        try:
            with self._lock:
                if pairs and epoch == self._epoch:
                    # Release first: an entry of before may have left, whose documents were never counted.
                    self._release(self._cache.insert(embedding, ids, partition=partition))
                    for one, document in pairs:
                        self._documents[partition, one] = document
                        self._uses[partition, one] += 1
        except (RetrievalError, TypeError):
            raise
        except Exception:
            log.warning("the query cache failed to keep a result", exc_info=True)
        return Retrieved(documents, False, None, lookup_us)

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


def _matches(entry: Entry, where: Callable[[Hashable], bool] | None, named: Set[ResultId] | None) -> bool:
    if where is not None and not where(entry.partition):
        return False
    return named is None or not named.isdisjoint(entry.ids)
