"""Faiss: the exact scan (IndexFlat), and the approximate graph over full vectors (HNSW)."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ragcachekit.errors import RetrievalError
from ragcachekit.search.base import VectorIndex
from ragcachekit.search.checks import Float32, GraphOptions, load_library


class FaissFlatIndex(VectorIndex):
    """Faiss's exact scan. Needs the extra ``faiss``."""

    kind: ClassVar[str] = "faiss-flat"

    def __init__(self, dim: int, metric: str = "cosine") -> None:
        super().__init__(dim, metric)
        self._faiss = load_library("faiss", "faiss")
        self._index = self._faiss.IndexIDMap2(self._make())

    def _make(self) -> Any:
        return self._faiss.IndexFlat(self.dim, self._faiss_metric())

    def _faiss_metric(self) -> Any:
        return self._faiss.METRIC_L2 if self.metric == "l2" else self._faiss.METRIC_INNER_PRODUCT

    def _add(self, labels: NDArray[np.int64], rows: Float32) -> None:
        self._index.add_with_ids(rows, labels)

    def _candidates(self, query: Float32, count: int) -> NDArray[np.int64]:
        labels: NDArray[np.int64] = self._index.search(query, count)[1][0]
        return labels[labels >= 0]  # Faiss pads with -1

    def _vectors(self, labels: NDArray[np.int64]) -> Float32:
        rows: Float32 = self._index.reconstruct_batch(labels)
        return rows

    def _remove(self, labels: NDArray[np.int64]) -> None:
        self._index.remove_ids(labels)

    def _write(self, path: Path) -> None:
        self._faiss.write_index(self._index, str(path))

    def _read(self, path: Path, count: int) -> None:
        index = self._faiss.read_index(str(path))
        if index.d != self.dim or index.ntotal != count or index.metric_type != self._faiss_metric():
            raise RetrievalError(f"{path} holds another index than its manifest names; build it anew")
        self._index = index


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

    def options(self) -> dict[str, Any]:
        return asdict(self._graph)
