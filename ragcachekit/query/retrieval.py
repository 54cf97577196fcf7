"""The documents of near-identical questions, returned without a search."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import TypeVar

from numpy.typing import ArrayLike

from ragcachekit.errors import RetrievalError
from ragcachekit.observers import Observers
from ragcachekit.query.adaptive import AdaptiveTolerance
from ragcachekit.query.base import Entry, Hit, LogOnce, ResultId
from ragcachekit.query.entries import Entries
from ragcachekit.query.invalidation import RevocableEntries
from ragcachekit.query.lookups import Found, Held, Lookup, Retrieved
from ragcachekit.query.near_misses.guard import near_miss
from ragcachekit.query.near_misses.parsing import parse
from ragcachekit.query.proximity import ProximityCache
from ragcachekit.query.saved import SavedEntries

log = logging.getLogger(__name__)

Document = TypeVar("Document")

_NO_EPOCH = -1  # in which nothing is inserted
_TRIES = 5


class CachedRetrieval(RevocableEntries[Document]):
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
        guard: bool = True,
        saved: SavedEntries[Document] | None = None,
        adaptive: AdaptiveTolerance | None = None,
    ) -> None:
        super().__init__(Entries(cache, saved), text)
        self._guard, self._adaptive = guard and cache.tolerance > 0, adaptive
        self._warn, self.observers = LogOnce(log), Observers()

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
        start = time.perf_counter()
        hit, epoch, refused, replaces, note = None, _NO_EPOCH, None, None, None
        pairs: Found[Document] = ()
        try:
            with self._lock:
                hit, refused, replaces = self._find(embedding, partition, question, k)
                epoch = self._epoch
                if hit is not None:
                    pairs = self._entries.held[hit.ids[0]].found[:k]
        except Exception as error:
            hit, note = None, self._note(error)
        documents = tuple([document for _, document in pairs])
        ids = tuple([one for one, _ in pairs]) if self._adaptive is not None else ()
        distance, lookup_us = None if hit is None else hit.distance, (time.perf_counter() - start) * 1e6
        result = Retrieved(documents, hit is not None, distance, lookup_us, note, refused)
        asked = Lookup(result, embedding, partition, epoch, question, k, ids, replaces, start)
        if self.observers:
            self.observers.looked_up(asked.seen())
        return asked

    def insert(
        self, asked: Lookup[Document], found: Found[Document], radius: float | None = None
    ) -> Retrieved[Document]:
        """Insert what a search found, unless something was invalidated meanwhile.

        ``radius`` is the distance of the last of k results from the question by the index's metric: l2 (not
        squared), 1 - cosine, or minus the inner product. See :meth:`invalidate_near`.
        """
        pairs, note = tuple(found), asked.result.note
        if self.observers:
            self.observers.searched(asked.seen(len(pairs)))
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

    def _find(
        self, embedding: ArrayLike, partition: Hashable, question: str | None, k: int | None
    ) -> tuple[Hit | None, str | None, ResultId | None]:
        """The hit, or why an entry within the tolerance is none, and that entry if it is to be replaced."""
        self._take_over()
        refused: str | None = None
        replaces: ResultId | None = None

        def accept(entry: Entry) -> bool:
            nonlocal refused, replaces
            held = self._entries.held[entry.ids[0]]
            if refused := held.refusal(k):
                replaces = entry.ids[0]
            elif self._guard and question is not None and held.question is not None:
                refused = near_miss(parse(question), held.question)
            return refused is None

        cache, tolerance = self._entries.cache, None
        if self._adaptive is not None:
            tolerance = self._adaptive.tolerance(partition, embedding, cache.tolerance)
        hit = cache.lookup(embedding, partition=partition, tolerance=tolerance, accept=accept)
        return hit, refused, replaces

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

    def _note(self, error: Exception) -> str:
        """The error as a note; logged once, since an embedder that fails may fail at every question."""
        unusable = isinstance(error, RetrievalError | TypeError)
        note = f"{'the embedding cannot be used' if unusable else 'the query cache failed'}: {error}"
        self._warn(f"{note}; searching instead", None if unusable else error)
        return note
