"""Searches of a document index: filters over ever more candidates, in one step or in stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

from numpy.typing import ArrayLike

from ragcachekit.config import positive
from ragcachekit.search.base import VectorIndex
from ragcachekit.search.documents.record import Hit, Record, Where, as_predicate
from ragcachekit.search.documents.state import IndexState
from ragcachekit.search.results import SearchResult

_MORE = 4  # how many times k a filtered search asks for first, and more at each further try


class DocumentSearches:
    """One search: ``k`` documents that ``where`` accepts.

    ``session`` gives the lock of the index with the newest state; filters are called outside of it.
    """

    def __init__(
        self,
        state: IndexState,
        session: Callable[[], AbstractContextManager[object]],
        k: int,
        where: Where | None,
    ) -> None:
        self._state, self._session, self._k = state, session, positive("k", k)
        self._accepts: Callable[[Record], bool] = as_predicate({} if where is None else where)
        self._count = self._k if where is None else _MORE * self._k

    def whole(self, embedding: ArrayLike) -> list[Hit]:
        """The nearest accepted documents."""
        while True:
            with self._session():
                index = self._state.index
                if index is None or not len(index):
                    return []
                size, hits = len(index), self._state.hits(index.search(embedding, self._count))
            if hits is None:
                continue
            kept = self._kept(hits)
            if len(kept) == self._k or self._count >= size:
                return kept
            self._count *= _MORE

    def staged(self, embedding: ArrayLike, stages: int) -> Iterator[list[Hit]]:
        """Provisional results; the last is what :meth:`whole` returns at some moment of the call."""
        with self._session():
            index = self._state.index
            if index is None or not len(index):
                return iter([list[Hit]()])
            return self._steps(embedding, index, index.search_stages(embedding, self._count, stages))

    def _steps(
        self, embedding: ArrayLike, index: VectorIndex, steps: Iterator[SearchResult]
    ) -> Iterator[list[Hit]]:
        kept, size = list[Hit](), 0
        while True:
            hits = None
            with self._session():
                if self._state.index is index and len(index):
                    result = next(steps, None)
                    if result is None:
                        break
                    size, hits = len(index), self._state.hits(result)
            if hits is None:  # another process changed what was found, or nothing is left
                yield self.whole(embedding)
                return
            kept = self._kept(hits)
            yield kept
        if len(kept) < self._k and self._count < size:
            self._count *= _MORE
            yield self.whole(embedding)

    def _kept(self, hits: list[Hit]) -> list[Hit]:
        return [hit for hit in hits if self._accepts(hit.record)][: self._k]
