"""The documents of near-identical questions, returned without a search."""

from __future__ import annotations

import functools
import itertools
import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ragcachekit.errors import RetrievalError
from ragcachekit.observers import Observers, QueryLookup, epoch_ns
from ragcachekit.retrieval.distances import Float32
from ragcachekit.retrieval.near_misses import Guard, near_miss
from ragcachekit.retrieval.partition import LogOnce
from ragcachekit.retrieval.proximity import Entry, Hit, ProximityCache, QueryCacheStats, ResultId
from ragcachekit.retrieval.saved import Held, SavedEntries

log = logging.getLogger(__name__)

Document = TypeVar("Document")
Found: TypeAlias = Sequence[tuple[ResultId, Document]]
"""What a search returns: ``(id, document)`` in order of relevance."""

_NO_EPOCH = -1  # in which nothing is inserted
_TRIES = 5
_ROUNDING = 1e-5  # of an index that computes in float32
_ROWS = 4096  # keys that are widened to float64 at a time


@dataclass(frozen=True)
class Retrieved(Generic[Document]):
    """Documents in order, and where they came from.

    The documents are the very objects that the search returned; hand out copies. ``distance`` is that of
    the cached query in the metric's unit, None after a search; ``lookup_us`` are microseconds in the
    cache. ``note`` is why the cache could not be used, if it could not. ``refused`` is why an entry within
    the tolerance was not used: a reason of the guard, "fewer results" or "expired".
    """

    documents: tuple[Document, ...]
    hit: bool
    distance: float | None
    lookup_us: float
    note: str | None = None
    refused: str | None = None


class Lookup(NamedTuple, Generic[Document]):
    """A finished lookup: its result, and what an insert after a miss needs.

    ``started_at`` is in seconds of :func:`time.perf_counter`.
    """

    result: Retrieved[Document]
    embedding: ArrayLike
    partition: Hashable
    epoch: int
    question: str | None = None
    k: int | None = None
    replaces: ResultId | None = None
    started_at: float = 0.0

    def event(self, searched: int | None = None) -> QueryLookup:
        """The lookup for observers; after a search, with how many documents it found."""
        result, now = self.result, time.perf_counter()
        found: Literal["hit", "miss", "refused", "failed"] = "hit" if result.hit else "miss"
        if not result.hit and (result.note or result.refused):
            found = "failed" if result.note else "refused"
        lookup = result.lookup_us / 1e6
        return QueryLookup(
            found,
            epoch_ns(self.started_at),
            lookup,
            result.distance,
            len(result.documents) if searched is None else searched,
            None if searched is None else now - self.started_at - lookup,
        )


class CachedRetrieval(Generic[Document]):
    """A query cache together with the documents that were found. Thread safe.

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
    guard : bool or callable
        Compare the text of a question with that of the near cached one, if both are given and the tolerance
        is above 0. One that negates it, or has other numbers or names, is no hit; see
        :func:`ragcachekit.retrieval.near_misses.near_miss`. A function is called with both texts and
        returns whether the cached documents may be used, such as by the score of a cross-encoder.
    saved : SavedEntries, optional
        Entries outlive the process and are shared with others. A change by another process is seen at the
        first lookup after the poll interval; until then its documents may be returned.

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
        saved: SavedEntries[Document] | None = None,
    ) -> None:
        self._cache, self._text, self._saved = cache, text, saved
        self._guard = guard if cache.tolerance > 0 else False
        self._held: dict[ResultId, Held[Document]] = {}  # by the number that the query cache stores
        self._numbers, self._epoch = itertools.count(), 0
        self._lock = threading.Lock()  # entries, documents and epoch change together
        self._warn, self.observers = LogOnce(log), Observers()
        with self._lock:
            self._take_over(now=True)

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
        k: int | None = None,
    ) -> Retrieved[Document]:
        """The documents of a near question, or those that ``search()`` finds. Arguments as for lookup.

        What ``search`` raises is passed on.
        """
        lookup = self.lookup(embedding, partition, question=question, k=k)
        return lookup.result if lookup.result.hit else self.insert(lookup, search())

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
        documents: tuple[Document, ...] = ()
        try:
            with self._lock:
                hit, refused, replaces = self._find(embedding, partition, question, k)
                epoch = self._epoch
                if hit is not None:
                    documents = tuple([one for _, one in self._held[hit.ids[0]].found[:k]])
        except Exception as error:
            hit, note = None, self._note(error)
        distance, lookup_us = None if hit is None else hit.distance, (time.perf_counter() - start) * 1e6
        result = Retrieved(documents, hit is not None, distance, lookup_us, note, refused)
        lookup = Lookup(result, embedding, partition, epoch, question, k, replaces, start)
        if self.observers:
            self.observers.looked_up(lookup.event())
        return lookup

    def insert(
        self, lookup: Lookup[Document], found: Found[Document], radius: float | None = None
    ) -> Retrieved[Document]:
        """Insert what a search found, unless something was invalidated meanwhile.

        ``radius`` is the distance of the last of k results from the question by the index's metric: l2 (not
        squared), 1 - cosine, or minus the inner product. See :meth:`invalidate_near`.
        """
        pairs = tuple(found)
        result = self.searched(lookup, [document for _, document in pairs])
        try:
            with self._lock:
                if pairs:
                    self._insert(lookup, Held(pairs, lookup.question, lookup.k, radius))
        except Exception as error:
            return replace(result, note=self._note(error))
        return result

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

        return self._invalidate(lambda: goes)

    def invalidate_near(self, embeddings: ArrayLike) -> int:
        """Drop entries into whose results a new document may belong; returns how many.

        ``embeddings`` ``[m, dim]`` are those of the new documents. An entry goes if one of these is
        within the radius given to :meth:`insert`, and always if it has no radius or fewer than k results.
        Embeddings of another width, or without rows, drop everything. OSError as for :meth:`invalidate`.
        """
        added = np.atleast_2d(np.asarray(embeddings, np.float64))

        def reached() -> Callable[[Entry, Held[Document]], bool]:
            numbers = self._reached(added)
            return lambda entry, _: entry.ids[0] in numbers

        return self._invalidate(reached)

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

        return self._invalidate(lambda: goes)

    def while_current(self, epoch: int, action: Callable[[], object]) -> bool:
        """Run ``action`` if nothing was invalidated since ``epoch``; nothing is until it has ended."""
        with self._lock:
            if epoch == self._epoch:
                action()
            return epoch == self._epoch

    def stats(self) -> QueryCacheStats:
        """The cache's counters."""
        return self._cache.stats()

    def check(self) -> None:
        """AssertionError if the bookkeeping contradicts itself; for tests."""
        self._cache.check()
        named = [number for entry, _ in self._cache.entries() for number in entry.ids]
        assert sorted(named) == sorted(self._held), "documents without an entry, or an entry without them"

    def _find(
        self, embedding: ArrayLike, partition: Hashable, question: str | None, k: int | None
    ) -> tuple[Hit | None, str | None, ResultId | None]:
        """The hit, or why an entry within the tolerance is none, and that entry if it is to be replaced."""
        self._take_over()
        refused: str | None = None
        replaces: ResultId | None = None

        def accept(entry: Entry) -> bool:
            nonlocal refused, replaces
            held = self._held[entry.ids[0]]
            if refused := held.refusal(k):
                replaces = entry.ids[0]
            elif self._guard and question is not None and held.question is not None:
                refused = self._refused_by_guard(question, held.question)
            return refused is None

        hit = self._cache.lookup(embedding, partition=partition, accept=accept)
        return hit, refused, replaces

    def _refused_by_guard(self, question: str, cached: str) -> str | None:
        if callable(self._guard):
            return None if question == cached or self._guard(question, cached) else "guard"
        return near_miss(question, cached)

    def _insert(self, lookup: Lookup[Document], held: Held[Document]) -> None:
        """Insert unless something was invalidated, also by another process, since the lookup."""
        for _ in range(_TRIES):
            if lookup.epoch != self._epoch:
                return
            try:
                if self._saved is not None:
                    key = self._saved.add(lookup.embedding, lookup.partition, held)
                    held = held._replace(key=key)
            except BlockingIOError:
                self._take_over(now=True)
                continue
            self._put(lookup.embedding, lookup.partition, held)
            if lookup.replaces in self._held:
                self._drop(lambda entry, _: entry.ids[0] == lookup.replaces)
            return

    def _put(self, embedding: ArrayLike, partition: Hashable, held: Held[Document]) -> None:
        number = next(self._numbers)
        self._held[number] = held
        try:
            left = self._cache.insert(embedding, (number,), partition=partition)
        except Exception:
            self._unsave([self._held.pop(number)])
            raise
        self._unsave([self._held.pop(entry.ids[0]) for entry in left])

    def _drop(self, goes: Callable[[Entry, Held[Document]], bool]) -> int:
        left = self._cache.forget(lambda entry: goes(entry, self._held[entry.ids[0]]))
        self._unsave([self._held.pop(entry.ids[0]) for entry in left])
        return len(left)

    def _unsave(self, gone: Iterable[Held[Document]]) -> None:
        if self._saved is not None:
            self._saved.remove([held.key for held in gone if held.key is not None])

    def _invalidate(self, choose: Callable[[], Callable[[Entry, Held[Document]], bool]]) -> int:
        with self._lock:
            self._epoch += 1  # what a search of before finds from here on is not inserted
            try:
                while self._saved is not None and not self._saved.announce():
                    self._take_over(now=True)
                self._take_over(now=True)
                if self._saved is not None:
                    self._saved.remove_unread()
            except OSError:
                self._drop(choose())
                raise
            return self._drop(choose())

    def _take_over(self, *, now: bool = False) -> None:
        """Apply what other processes changed.

        If one invalidated anything, entries that are not saved go, since those processes cannot name them.
        """
        if self._saved is None:
            return
        changes = self._saved.changes(now=now)
        if changes.invalidated:
            self._epoch += 1
        if changes.gone or changes.invalidated:
            unsaved = {None} if changes.invalidated else set[str | None]()
            self._drop(lambda _, held: held.key in changes.gone or held.key in unsaved)
        for entry in changes.added:
            expires = None if self._cache.ttl is None else entry.saved_at + self._cache.ttl
            try:
                self._put(entry.embedding, entry.partition, entry.held._replace(expires=expires))
            except (RetrievalError, TypeError) as error:
                self._warn(f"a saved query is left out: {error}")

    def _reached(self, added: NDArray[np.float64]) -> set[ResultId]:
        """Numbers of the entries into whose results one of ``added`` ``[m, dim]`` may belong."""
        entries = self._cache.entries()
        numbers = [entry.ids[0] for entry, _ in entries]
        if not entries or not added.size or added.ndim != 2 or added.shape[1] != entries[0][1].size:
            return set(numbers)
        radii = [self._held[number].known_radius for number in numbers]
        within = _within([key for _, key in entries], radii, added, self._cache.metric)
        return {number for number, near in zip(numbers, within, strict=True) if near}

    def _note(self, error: Exception) -> str:
        """The error as a note; logged once, since an embedder that fails may fail at every question."""
        unusable = isinstance(error, RetrievalError | TypeError)
        note = f"{'the embedding cannot be used' if unusable else 'the query cache failed'}: {error}"
        self._warn(f"{note}; searching instead", None if unusable else error)
        return note


def _within(
    keys: Sequence[Float32], radii: Sequence[float], added: NDArray[np.float64], metric: str
) -> list[bool]:
    """For each key ``[dim]``, whether one of the rows of ``added`` lies within its radius.

    Rounding counts as within, and so do zero vectors and numbers that are not finite.
    """
    out: list[bool] = []
    norms = np.einsum("ij,ij->i", added, added)
    for start in range(0, len(keys), _ROWS):
        rows = np.stack(keys[start : start + _ROWS]).astype(np.float64)
        limits: Any = np.asarray(radii[start : start + _ROWS])[:, None]
        with np.errstate(all="ignore"):
            dots, squared = rows @ added.T, np.einsum("ij,ij->i", rows, rows)[:, None]
            if metric == "l2":
                far = squared + norms - 2 * dots > limits**2 + _ROUNDING * (squared + norms)
            elif metric == "cosine":
                far = 1 - dots / np.sqrt(squared * norms) > limits + _ROUNDING
            else:
                far = -dots > limits + _ROUNDING * np.sqrt(squared * norms)
        out += (~far.all(axis=1)).tolist()
    return out
