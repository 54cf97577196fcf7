"""Faiss, approximate: a graph over full vectors (HNSW)."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ragcachekit.errors import RetrievalError
from ragcachekit.search.checks import Float32, positive
from ragcachekit.search.faiss_flat import FaissFlatIndex


class FaissHnswIndex(FaissFlatIndex):
    """Faiss's HNSW. Cannot remove; a search may find fewer than k. Needs the extra ``faiss``.

    Parameters
    ----------
    links : int
        Neighbours per node (M).
    ef_construction, ef_search : int
        Breadth while building and while searching (at least the number of results asked for).
    """

    kind: ClassVar[str] = "faiss-hnsw"

    def __init__(
        self,
        dim: int,
        metric: str = "cosine",
        *,
        links: int = 32,
        ef_construction: int = 200,
        ef_search: int = 64,
    ) -> None:
        self._links = positive("links", links)
        self._ef_construction = positive("ef_construction", ef_construction)
        self._ef_search = positive("ef_search", ef_search)
        super().__init__(dim, metric)

    def _make(self) -> Any:
        graph = self._faiss.IndexHNSWFlat(self._dim, self._links, self._faiss_metric())
        graph.hnsw.efConstruction = self._ef_construction
        return graph

    def _candidates(self, query: Float32, count: int) -> NDArray[np.int64]:
        breadth = self._faiss.SearchParametersHNSW(efSearch=max(self._ef_search, count))
        labels: NDArray[np.int64] = self._index.search(query, count, params=breadth)[1][0]
        return labels[labels >= 0]

    def _remove(self, labels: NDArray[np.int64]) -> None:
        raise RetrievalError("faiss-hnsw cannot remove; use hnswlib or faiss-flat, or build the index anew")

    def _options(self) -> dict[str, Any]:
        return {
            "links": self._links,
            "ef_construction": self._ef_construction,
            "ef_search": self._ef_search,
        }
