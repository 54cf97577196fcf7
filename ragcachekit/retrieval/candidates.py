"""Results of an index of one's own: more than was asked for, put in order anew for each question they serve.

A cached question's nearest documents are those of a near question in another order. With a few more of them
and their vectors, the order and the cut at k are those of the present question. Proximity returns the cached
list as it is; on its workload (four prefixes per question) that has 84 % of the index's own results, four
times as many candidates have 99 %.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ragcachekit.errors import RetrievalError
from ragcachekit.retrieval.document_storage import Record
from ragcachekit.retrieval.documents import DocumentIndex

FACTOR = 4
"""Candidates per document that is asked for."""

Document = TypeVar("Document")


class Candidate(NamedTuple):
    """A document as the index holds it (``id``, ``text``, ``metadata``), vector ``[dim]`` and distance."""

    record: Record
    vector: NDArray[np.float32]
    distance: float

    @property
    def text(self) -> str:
        """Text of the document."""
        return str(self.record.text)


@dataclass(frozen=True)
class OwnSearch(Generic[Document]):
    """The search of one question for the ``k`` nearest documents that ``where`` accepts.

    ``document`` converts what the index holds, and its distance from the question.
    """

    index: DocumentIndex
    k: int
    where: Any
    document: Callable[[Any, float], Document]

    @property
    def wanted(self) -> int:
        """How many candidates are searched."""
        return FACTOR * self.k

    def search(self, embedding: ArrayLike) -> list[Candidate]:
        """The nearest candidates; fewer if there are no more."""
        while True:
            found = self.index.search(embedding, self.wanted, self.where)
            try:
                vectors = self.index.vectors([record.id for record, _ in found]) if found else ()
            except RetrievalError:  # one of them was deleted meanwhile
                continue
            pairs = zip(found, vectors, strict=True)
            return [Candidate(record, vector, distance) for (record, distance), vector in pairs]

    def radius(self, candidates: Sequence[Candidate]) -> float | None:
        """Distance of the last candidate; None where there were no more, and any new document counts."""
        return candidates[-1].distance if len(candidates) == self.wanted else None

    def nearest(self, candidates: Sequence[Candidate], embedding: ArrayLike) -> list[tuple[Any, float]]:
        """The ``k`` candidates nearest to a question and their distances, as the index orders them."""
        if not candidates:
            return []
        distances = self._distances(np.stack([one.vector for one in candidates]), embedding)
        order = np.argsort(distances, kind="stable")[: self.k]
        return [(candidates[at].record, float(distances[at])) for at in order.tolist()]

    def documents(self, found: Sequence[tuple[Any, float]]) -> tuple[Document, ...]:
        """What a retriever hands out."""
        return tuple(self.document(record, distance) for record, distance in found)

    def _distances(self, vectors: NDArray[np.float32], embedding: ArrayLike) -> NDArray[np.float64]:
        query, rows = np.asarray(embedding, np.float64), vectors.astype(np.float64)
        if self.index.metric == "l2":
            return np.asarray(np.linalg.norm(rows - query, axis=1))
        if self.index.metric == "cosine":
            return np.asarray(1.0 - rows @ (query / np.linalg.norm(query)))
        return -(rows @ query)


def to_json(candidate: Any) -> dict[str, Any]:
    """A candidate as a JSON value; AttributeError for anything else."""
    record = candidate.record
    vector = base64.b64encode(candidate.vector.astype("<f4").tobytes()).decode()
    named = {"id": record.id, "text": record.text, "metadata": record.metadata}
    return {**named, "vector": vector, "distance": candidate.distance}


def from_json(value: Any) -> Candidate:
    """What :func:`to_json` wrote; KeyError, TypeError or ValueError for anything else."""
    vector = np.frombuffer(base64.b64decode(value["vector"], validate=True), "<f4").astype(np.float32)
    return Candidate(Record(value["id"], value["text"], value["metadata"]), vector, value["distance"])
