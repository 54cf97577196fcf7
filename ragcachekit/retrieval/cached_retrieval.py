"""The documents of near-identical questions, returned without a search."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Generic, Literal, NamedTuple, TypeAlias, TypeVar

from numpy.typing import ArrayLike

from ragcachekit.errors import RetrievalError
from ragcachekit.observers import Observers, QueryLookup, epoch_ns
from ragcachekit.retrieval.near_misses import Guard, near_miss
from ragcachekit.retrieval.proximity import Entry, ProximityCache, QueryCacheStats
from ragcachekit.retrieval.saved import Group, Held, ResultId, SavedQuestions
from ragcachekit.types import SECONDS_OR_NONE, check_number

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
    cache. ``note`` is why the cache could not be used, if it could not. ``refused`` is why an entry within
    the tolerance was not used: a reason of the guard, or "expired".
    """

    documents: tuple[Document, ...]
    hit: bool
    distance: float | None
    lookup_us: float
    note: str | None = None
    refused: str | None = None


class Lookup(NamedTuple, Generic[Document]):
    """A finished lookup: its result, and what an insert after a miss needs.

    ``started_at`` is in seconds of :func:`time.perf_counter`; in ``group`` the insert is saved.
    """

    result: Retrieved[Document]
    embedding: ArrayLike
    partition: Hashable
    epoch: int
    question: str | None = None
    started_at: float = 0.0
    group: Group | None = None

    def event(self, searched: int | None = None) -> QueryLookup:
        """The lookup for observers; after a search, with how many documents it found."""
        result, seconds = self.result, self.result.lookup_us / 1e6
        found: Literal["hit", "miss", "refused", "failed"] = "hit" if result.hit else "miss"
        if not result.hit and (result.note or result.refused):
            found = "failed" if result.note else "refused"
        search = None if searched is None else time.perf_counter() - self.started_at - seconds
        documents = len(result.documents) if searched is None else searched
        return QueryLookup(found, epoch_ns(self.started_at), seconds, result.distance, documents, search)


class CachedRetrieval(Generic[Document]):
    """A query cache together with the documents that were found. Thread safe.

    Documents are stored with the entry of their search and dropped with it: never more than
    ``capacity * k``. No document crosses a partition.

    If a lookup or an insert fails, or the cache cannot use the embedding (zeros, NaN, another width), the
    search answers; errors are logged. The search runs outside all locks. What it found is not inserted if
    :meth:`invalidate` or the like ran meanwhile, nor if it found nothing (mostly an index that is not filled
    yet).

    Parameters
    ----------
    cache : ProximityCache
        Empty; nothing else may insert into it.
    text : callable, optional
        The text of a document, for :meth:`invalidate` and :meth:`forget_texts`.
    guard : bool or callable
        Compare the text of a question with that of the near cached one, if both are given and the tolerance
        is above 0. One that negates it, or has other numbers or names, is no hit; see
        :func:`ragcachekit.retrieval.near_misses.near_miss`. A function is called with both texts and
        returns whether the cached documents may be used, such as by the score of a cross-encoder.
    ttl : float, optional
        Seconds after its search at which an entry expires; a hit does not prolong them.
    max_idle : float, optional
        Seconds after its last hit, or its search, at which an entry expires.
    saved : SavedQuestions, optional
        Where entries are kept for the next process.
    shown : callable, optional
        Makes of what is cached the document for ``where`` of :meth:`invalidate`.

    Attributes
    ----------
    observers : Observers
        Called at lookups and after searches; those of an engine, if the cache was added to one.
    """

    def __init__(
        self,
        cache: ProximityCache,
        text: Callable[[Document], str] | None = None,
        *,
        guard: bool | Guard = True,
        ttl: float | None = None,
        max_idle: float | None = None,
        saved: SavedQuestions[Document] | None = None,
        shown: Callable[[Document], Document] = lambda document: document,
    ) -> None:
        for name, seconds in (("ttl", ttl), ("max_idle", max_idle)):
            check_number(name, seconds, "a number of seconds, or None", kinds=SECONDS_OR_NONE, positive=True)
        self._cache, self._text, self._ttl, self._max_idle = cache, text, ttl, max_idle
        self._saved, self._shown = saved, shown
        self._guard = guard if cache.tolerance > 0 else False
        self._epoch = 0
        self._lock = threading.Lock()  # entries and epoch change together
        self._warn, self.observers = functools.lru_cache(100)(log.warning), Observers()

    @property
    def epoch(self) -> int:
        """Rises whenever something is invalidated."""
        return self._epoch

    def get(
        self,
        embedding: ArrayLike,
        partition: Hashable,
        search: Callable[[], Found[Document]],
        *,
        question: str | None = None,
    ) -> Retrieved[Document]:
        """The documents of a near question, or those that ``search()`` finds. Arguments as for lookup.

        What ``search`` raises is passed on.
        """
        lookup = self.lookup(embedding, partition, question=question)
        return lookup.result if lookup.result.hit else self.insert(lookup, search())

    def lookup(
        self, embedding: ArrayLike, partition: Hashable, *, question: str | None = None
    ) -> Lookup[Document]:
        """Look up; after a miss, search and call :meth:`insert`. ``question`` is its text, for the guard."""
        start, epoch, hit = time.perf_counter(), _NO_EPOCH, None
        refused: str | None = None
        note: str | None = None

        def accept(entry: Entry) -> bool:
            nonlocal refused
            held: Held[Document] = entry.results[0]
            if self._is_expired(held):
                refused = "expired"
            elif self._guard and question is not None and held.question is not None:
                refused = self._refused_by_guard(question, held.question)
            return refused is None

        try:
            with self._lock:
                epoch = self._epoch
                hit = self._cache.lookup(embedding, partition=partition, accept=accept)
                if hit is not None:
                    hit.results[0].used_at = time.time()
                if refused == "expired":
                    self._drop(lambda _, held: self._is_expired(held))
        except Exception as error:
            note, epoch = self._note(error), _NO_EPOCH
        documents = () if hit is None else tuple([one for _, one in hit.results[0].found])
        distance, lookup_us = None if hit is None else hit.distance, (time.perf_counter() - start) * 1e6
        result = Retrieved(documents, hit is not None, distance, lookup_us, note, refused)
        lookup = Lookup(result, embedding, partition, epoch, question, start)
        if self.observers:
            self.observers.looked_up(lookup.event())
        return lookup

    def insert(self, lookup: Lookup[Document], found: Found[Document]) -> Retrieved[Document]:
        """Insert what a search found, unless something was invalidated meanwhile."""
        held = Held(tuple(found), lookup.question, time.time())
        result = self.searched(lookup, [document for _, document in held.found])
        try:
            with self._lock:
                if held.found and lookup.epoch == self._epoch:
                    self._cache.insert(lookup.embedding, [held], partition=lookup.partition)
                    if self._saved is not None and lookup.group is not None:
                        namespace = getattr(lookup.partition, "namespace", "")
                        self._saved.put(lookup.group, namespace, lookup.embedding, held)
        except Exception as error:
            return replace(result, note=self._note(error))
        return result

    def restore(self, partition: Hashable, group: Group, width: int) -> None:
        """Insert what earlier processes left in a group, if its embeddings have ``width`` numbers."""
        with self._lock:
            for embedding, held in () if self._saved is None else self._saved.of(group):
                if len(embedding) == width and not self._is_expired(held):
                    with suppress(RetrievalError):  # another metric was asked for
                        self._cache.insert(embedding, [held], partition=partition)

    def searched(self, lookup: Lookup[Document], documents: Iterable[Document]) -> Retrieved[Document]:
        """The result of a search that is not kept; tells the observers."""
        result = replace(lookup.result, documents=tuple(documents))
        if self.observers:
            self.observers.searched(lookup.event(len(result.documents)))
        return result

    def invalidate(
        self,
        *,
        ids: Iterable[ResultId] | None = None,
        texts: Iterable[str] | None = None,
        where: Callable[[Document], bool] | None = None,
    ) -> int:
        """Drop entries that hold one of certain documents, saved ones too; returns how many were in memory.

        A document counts if its id is among ``ids``, its text among ``texts`` (whitespace around it does not
        matter), or ``where`` is true for it; with none of these every entry does. Call it when documents
        change or go. TypeError for one string instead of several, or for ``texts`` without ``text``.
        """
        if isinstance(ids, str) or isinstance(texts, str):
            raise TypeError("ids and texts must be collections, not one string; put it into a list")
        if texts is not None and self._text is None:
            raise TypeError("texts can be compared only if the CachedRetrieval was given text=")
        named, gone, text = frozenset(ids or ()), {one.strip() for one in texts or ()}, self._text
        everything = ids is None and texts is None and where is None

        def counts(one: ResultId, document: Document) -> bool:
            of_text = text is not None and bool(gone) and text(document).strip() in gone
            return one in named or of_text or (where is not None and where(self._shown(document)))

        return self._invalidate(lambda _, held: everything or any(counts(*pair) for pair in held.found))

    def clear(self) -> int:
        """Drop all entries and documents; returns the number of entries dropped."""
        return self.invalidate()

    def forget_texts(self, namespace: str, forgotten: Callable[[str], bool] | None = None) -> int:
        """Drop entries of a namespace with a document whose text is ``forgotten``; with None, all."""
        text, is_gone = self._text, forgotten and functools.cache(forgotten)  # it may split texts into tokens

        def goes(place: Hashable, held: Held[Document]) -> bool:
            if getattr(place, "namespace", None) != namespace:
                return False
            return is_gone is None or text is None or any(is_gone(text(one)) for _, one in held.found)

        return self._invalidate(goes)

    def while_current(self, epoch: int, action: Callable[[], object]) -> bool:
        """Run ``action`` if nothing was invalidated since ``epoch``; nothing is until it has ended."""
        with self._lock:
            if epoch == self._epoch:
                action()
            return epoch == self._epoch

    def stats(self) -> QueryCacheStats:
        """The cache's counters."""
        return self._cache.stats()

    def _refused_by_guard(self, question: str, cached: str) -> str | None:
        if callable(self._guard):
            return None if question == cached or self._guard(question, cached) else "guard"
        return near_miss(question, cached)

    def _is_expired(self, held: Held[Document]) -> bool:
        now, used_at = time.time(), max(held.found_at, held.used_at)
        is_old = self._ttl is not None and now >= held.found_at + self._ttl
        return is_old or (self._max_idle is not None and now >= used_at + self._max_idle)

    def _drop(self, goes: Callable[[Hashable, Held[Document]], bool]) -> int:
        return len(self._cache.forget(lambda entry: goes(entry.partition, entry.results[0])))

    def _invalidate(self, goes: Callable[[Hashable, Held[Document]], bool]) -> int:
        with self._lock:
            self._epoch += 1  # what a search of before finds from here on is not inserted
            dropped = self._drop(goes)
            if self._saved is not None:
                self._saved.drop(goes)
            return dropped

    def _note(self, error: Exception) -> str:
        """The error as a note; logged once, since an embedder that fails may fail at every question."""
        unusable = isinstance(error, RetrievalError | TypeError)
        note = f"{'the embedding cannot be used' if unusable else 'the query cache failed'}: {error}"
        self._warn(f"{note}; searching instead")
        return note
