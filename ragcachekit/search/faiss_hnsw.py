"""Faiss, approximate: a graph over full vectors (HNSW)."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ragcachekit.errors import RetrievalError
from ragcachekit.search.checks import Float32, GraphOptions
from ragcachekit.search.faiss_flat import FaissFlatIndex


class FaissHnswIndex(FaissFlatIndex):
    """Faiss's HNSW with :class:`GraphOptions`. Cannot remove; a search may find fewer than k."""

    kind: ClassVar[str] = "faiss-hnsw"

    def __init__(self, dim: int, metric: str = "cosine", **options: int) -> None:
        self._graph = GraphOptions(**options)
        super().__init__(dim, metric)

    def _make(self) -> Any:
        graph = self._faiss.IndexHNSWFlat(self.dim, self._graph.links, self._faiss_metric())
        graph.hnsw.efConstruction = self._graph.ef_construction
        return graph

    def _candidates(self, query: Float32, count: int) -> NDArray[np.int64]:
        breadth = self._faiss.SearchParametersHNSW(efSearch=max(self._graph.ef_search, count))
        labels: NDArray[np.int64] = self._index.search(query, count, params=breadth)[1][0]
        return labels[labels >= 0]

    def _remove(self, labels: NDArray[np.int64]) -> None:
        raise RetrievalError("faiss-hnsw cannot remove; use hnswlib or faiss-flat, or build the index anew")

    def _options(self) -> dict[str, Any]:
        return asdict(self._graph)
