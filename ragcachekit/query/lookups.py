"""What a cached retrieval returns, and what it holds of one search."""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, NamedTuple, TypeAlias, TypeVar

from numpy.typing import ArrayLike

from ragcachekit.observers import QueryLookup, epoch_ns
from ragcachekit.query.base import ResultId
from ragcachekit.query.near_misses.parsing import ParsedQuestion

Document = TypeVar("Document")
Found: TypeAlias = Sequence[tuple[ResultId, Document]]
"""What a search returns: ``(id, document)`` in order of relevance."""


@dataclass(frozen=True)
class Retrieved(Generic[Document]):
    """Documents in order, and where they came from.

    The documents are the very objects that the search returned; hand out copies. ``distance`` is that of
    the cached query in the metric's unit, None after a search; ``lookup_us`` are microseconds in the
    cache. ``note`` is why the cache could not be asked, if it could not. ``refused`` is why an entry within
    the tolerance was not used: what :func:`near_miss` says, "fewer results" or "expired".
    """

    documents: tuple[Document, ...]
    hit: bool
    distance: float | None
    lookup_us: float
    note: str | None = None
    refused: str | None = None


class Lookup(NamedTuple, Generic[Document]):
    """A finished lookup: its result, and what an insert after a miss or a check after a hit needs.

    ``begun`` is in seconds of :func:`time.perf_counter`.
    """

    result: Retrieved[Document]
    embedding: ArrayLike
    partition: Hashable
    epoch: int
    question: str | None = None
    k: int | None = None
    ids: tuple[ResultId, ...] = ()
    replaces: ResultId | None = None
    begun: float = 0.0

    def seen(self, searched: int | None = None) -> QueryLookup:
        """The lookup for observers; after a search, with how many documents it ``searched`` out."""
        result, now = self.result, time.perf_counter()
        found: Literal["hit", "miss", "refused", "failed"] = "hit" if result.hit else "miss"
        if not result.hit and (result.note or result.refused):
            found = "failed" if result.note else "refused"
        lookup = result.lookup_us / 1e6
        return QueryLookup(
            found,
            epoch_ns(self.begun),
            lookup,
            result.distance,
            len(result.documents) if searched is None else searched,
            None if searched is None else now - self.begun - lookup,
        )


class Held(NamedTuple, Generic[Document]):
    """The results of one search.

    ``k`` is the number asked for and ``radius`` as for :meth:`CachedRetrieval.insert`. ``key`` is that of the
    saved entry, None if there is none. ``expires`` is in seconds of :func:`time.time`.
    """

    found: tuple[tuple[ResultId, Document], ...]
    question: ParsedQuestion | None
    k: int | None
    radius: float | None
    key: str | None = None
    expires: float | None = None

    @property
    def known_radius(self) -> float:
        """The radius; infinite if it is not known or if there were fewer than k results."""
        full = self.k is None or len(self.found) >= self.k
        return float("inf") if self.radius is None or not full else self.radius

    def refusal(self, k: int | None) -> str | None:
        """Why these results do not answer a question for ``k`` of them now."""
        if self.expires is not None and time.time() >= self.expires:
            return "expired"
        return "fewer results" if k is not None and (self.k or len(self.found)) < k else None
