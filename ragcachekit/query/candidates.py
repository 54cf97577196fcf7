"""Results of an index of one's own: more than was asked for, put in order anew for each question they serve.

A cached question's nearest documents are those of a near question in another order. With a few more of them
and their vectors, the order and the cut at k are those of the present question. Proximity returns the cached
list as it is; on its workload (four prefixes per question) that has 84 % of the index's own results, four
times as many candidates have 99 %.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ragcachekit.errors import RetrievalError

FACTOR = 4
"""Candidates per document that is asked for."""

Document = TypeVar("Document")


class OwnIndex(Protocol):
    """The part of :class:`~ragcachekit.DocumentIndex` that is used here."""

    metric: str

    def search(self, embedding: ArrayLike, k: int, where: Any = None) -> Sequence[tuple[Any, float]]:
        """Documents with an ``id`` and their distances, nearest first."""
        ...

    def vectors(self, ids: Sequence[Any]) -> NDArray[np.float32]:
        """Vectors ``[n, dim]``; RetrievalError for an unknown id."""
        ...


class Candidate(NamedTuple, Generic[Document]):
    """A document, its id, its vector ``[dim]``, and its distance from the question it was searched for."""

    id: str | int
    document: Document
    vector: NDArray[np.float32]
    distance: float


def search_candidates(
    index: OwnIndex, embedding: ArrayLike, k: int, where: Any, document: Callable[[Any], Document]
) -> list[Candidate[Document]]:
    """The :data:`FACTOR` times ``k`` nearest; ``document`` converts what the index holds."""
    while True:
        found = index.search(embedding, FACTOR * k, where)
        try:
            vectors = index.vectors([one.id for one, _ in found]) if found else ()
        except RetrievalError:  # one of them was deleted meanwhile
            continue
        return [
            Candidate(one.id, document(one), vector, distance)
            for (one, distance), vector in zip(found, vectors, strict=True)
        ]


def radius_of(candidates: Sequence[Candidate[Any]], k: int) -> float | None:
    """Distance of the last candidate; None where the index had no more, and any new document would count."""
    return candidates[-1].distance if len(candidates) == FACTOR * k else None


def nearest(
    candidates: Sequence[Candidate[Document]], embedding: ArrayLike, metric: str, k: int
) -> list[Document]:
    """The documents of the ``k`` candidates nearest to a question, as the index orders them."""
    if not candidates:
        return []
    query = np.asarray(embedding, np.float64)
    rows = np.stack([one.vector for one in candidates]).astype(np.float64)
    scores = np.linalg.norm(rows - query, axis=1) if metric == "l2" else -(rows @ query)
    order = np.argsort(scores, kind="stable")[:k]
    return [candidates[int(at)].document for at in order]
