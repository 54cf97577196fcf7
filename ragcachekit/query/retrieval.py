"""The documents of near-identical questions, returned without a search."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from ragcachekit.errors import RetrievalError
from ragcachekit.query.adaptive import AdaptiveTolerance
from ragcachekit.query.base import Entry, LogOnce, QueryCacheStats, ResultId
from ragcachekit.query.entries import Entries
from ragcachekit.query.lookups import Found, Held, Lookup, Retrieved
from ragcachekit.query.near_misses.guard import near_miss
from ragcachekit.query.near_misses.parsing import parse
from ragcachekit.query.proximity import ProximityCache
from ragcachekit.query.saved import SavedEntries

log = logging.getLogger(__name__)

Document = TypeVar("Document")

_NO_EPOCH = -1  # in which nothing is inserted
_TRIES = 5


class CachedRetrieval(Generic[Document]):
    """A query cache together with the documents that were found.

    Documents are stored with the entry of their search and dropped with it: never more than
    ``capacity * k``. No document crosses a partition.

    Errors of lookup and insert are logged, and the search answers. So it does where the cache cannot use
    the embedding (zeros, NaN, another width). The search runs outside all locks. What it found is not
    inserted if :meth:`invalidate` or the like ran meanwhile, nor if it found nothing (mostly an index that is
    not filled yet).

    Parameters
    ----------
    cache : ProximityCache
        Empty; nothing else may insert into it.
    text : callable, optional
        The text of a document, for :meth:`invalidate` and :meth:`forget_texts`.
    guard : bool
        Compare the text of a question with that of the near cached one, if both are given and the tolerance
        is above 0. One that negates it, or names other numbers or names, is no hit; see
        :func:`ragcachekit.query.near_misses.guard.near_miss`.
    saved : SavedEntries, optional
        Entries outlive the process and are shared with others. A change by another process is seen at the
        first lookup after the poll interval; until then its documents may be returned.
    adaptive : AdaptiveTolerance, optional
        Tolerances per region, at most that of the cache.
    """

    def __init__(
        self,
        cache: ProximityCache,
        text: Callable[[Document], str] | None = None,
        *,
        guard: bool = True,
        saved: SavedEntries[Document] | None = None,
        adaptive: AdaptiveTolerance | None = None,
    ) -> None:
        self._entries, self._text, self._adaptive = Entries(cache, saved), text, adaptive
        self._guard = guard and cache.tolerance > 0
        self._epoch = 0
        self._warn = LogOnce(log)
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

    def get(
        self,
        embedding: ArrayLike,
        partition: Hashable,
        search: Callable[[], Found[Document]],
        *,
        question: str | None = None,
        k: int | None = None,
    ) -> Retrieved[Document]:
        """The documents of a near enough earlier query, else those of ``search()``.

        The search is called on a miss, and where the embedding is of no use. What it raises is passed on.
        With an adaptive tolerance it is also called after some hits, on a background thread.
        """
        asked = self.lookup(embedding, partition, question=question, k=k)
        if asked.result.hit:
            self.check(asked, search)
            return asked.result
        return self.insert(asked, search())

    def lookup(
        self,
        embedding: ArrayLike,
        partition: Hashable,
        *,
        question: str | None = None,
        k: int | None = None,
    ) -> Lookup[Document]:
        """Look up; after a miss, search and call :meth:`insert`.

        ``question`` is its text, for the guard. Of an entry that was searched with a larger ``k``, the first
        k documents are returned; one with a smaller k is a miss, and replaced by the insert.
        """
        start = time.perf_counter_ns()
        asked = Lookup[Document](
            Retrieved((), False, None, 0.0), embedding, partition, _NO_EPOCH, question, k
        )
        try:
            with self._lock:
                asked = self._looked_up(asked)
        except Exception as error:
            asked = asked._replace(result=replace(asked.result, note=self._note(error)))
        lookup_us = (time.perf_counter_ns() - start) / 1e3
        return asked._replace(result=replace(asked.result, lookup_us=lookup_us))

    def insert(
        self, asked: Lookup[Document], found: Found[Document], radius: float | None = None
    ) -> Retrieved[Document]:
        """Insert what a search found, unless something was invalidated meanwhile.

        ``radius`` is the distance of the last of k results from the question by the index's metric: l2 (not
        squared), 1 - cosine, or minus the inner product. See :meth:`invalidate_near`.
        """
        pairs, note = tuple(found), asked.result.note
        try:
            parsed = parse(asked.question) if self._guard and asked.question is not None else None
            with self._lock:
                if pairs and asked.epoch == self._epoch:
                    self._insert(asked, Held(pairs, parsed, asked.k, radius))
        except Exception as error:
            note = self._note(error)
        return replace(asked.result, documents=tuple([document for _, document in pairs]), note=note)

    def check(self, asked: Lookup[Document], search: Callable[[], Found[Document]]) -> None:
        """After a hit: let a share of hits be compared with ``search()``, on a background thread.

        Does nothing without an adaptive tolerance.
        """
        if self._adaptive is not None and asked.result.distance:  # an equal question needs no check
            where = asked.partition, asked.embedding
            self._adaptive.check(*where, asked.ids, lambda: [one for one, _ in search()])

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

    def _looked_up(self, asked: Lookup[Document]) -> Lookup[Document]:
        self._take_over()
        refused: str | None = None
        replaces: ResultId | None = None

        def accept(entry: Entry) -> bool:
            nonlocal refused, replaces
            held = self._entries.held[entry.ids[0]]
            if refused := held.refusal(asked.k):
                replaces = entry.ids[0]
            elif self._guard and asked.question is not None and held.question is not None:
                refused = near_miss(parse(asked.question), held.question)
            return refused is None

        cache, tolerance = self._entries.cache, None
        if self._adaptive is not None:
            tolerance = self._adaptive.tolerance(asked.partition, asked.embedding, cache.tolerance)
        hit = cache.lookup(asked.embedding, partition=asked.partition, tolerance=tolerance, accept=accept)
        if hit is None:
            result = replace(asked.result, refused=refused)
            return asked._replace(result=result, epoch=self._epoch, replaces=replaces)
        pairs = self._entries.held[hit.ids[0]].found[: asked.k]
        documents = tuple([document for _, document in pairs])
        result = replace(asked.result, documents=documents, hit=True, distance=hit.distance)
        return asked._replace(result=result, epoch=self._epoch, ids=tuple([one for one, _ in pairs]))

    def _insert(self, asked: Lookup[Document], held: Held[Document]) -> None:
        """Insert unless something was invalidated, also by another process, since the lookup."""
        for _ in range(_TRIES):
            if asked.epoch != self._epoch:
                return
            try:
                where, replaces = asked.partition, asked.replaces
                self._entries.insert(asked.embedding, where, held, asked.question, replaces)
                return
            except BlockingIOError:
                self._take_over(now=True)

    def _take_over(self, *, now: bool = False) -> None:
        if self._entries.take_over(now=now):
            self._epoch += 1

    def _note(self, error: Exception) -> str:
        """The error as a note; logged once, since an embedder that fails may fail at every question."""
        unusable = isinstance(error, RetrievalError | TypeError)
        note = f"{'the embedding cannot be used' if unusable else 'the query cache failed'}: {error}"
        self._warn(f"{note}; searching instead", None if unusable else error)
        return note

    def _invalidate(self, drop: Callable[[Entries[Document]], int]) -> int:
        with self._lock:
            self._epoch += 1  # what a search of before finds from here on is not inserted
            try:
                self._entries.begin_invalidation()
            except OSError:
                drop(self._entries)
                raise
            return drop(self._entries)
