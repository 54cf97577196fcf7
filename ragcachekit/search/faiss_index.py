"""Faiss: the exact scan (IndexFlat), and the approximate graph over full vectors (HNSW)."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ragcachekit.errors import RetrievalError
from ragcachekit.search.base import VectorIndex
from ragcachekit.search.checks import Float32, GraphOptions, load_library, row_ranges
from ragcachekit.search.manifest import Manifest

_REMOVED_SHARE = 0.3  # of a graph's rows, beyond which it is built anew


class FaissFlatIndex(VectorIndex):
    """Faiss's exact scan. Needs the extra ``faiss``."""

    kind: ClassVar[str] = "faiss-flat"
    maps: ClassVar[bool] = True

    def __init__(self, dim: int, metric: str = "cosine") -> None:
        super().__init__(dim, metric)
        self._faiss = load_library("faiss", "faiss", "faiss-cpu")
        self._index = self._faiss.IndexIDMap2(self._make())
        self._mapped = False

    def _make(self) -> Any:
        return self._faiss.IndexFlat(self.dim, self._faiss_metric())

    def _faiss_metric(self) -> Any:
        return self._faiss.METRIC_L2 if self.metric == "l2" else self._faiss.METRIC_INNER_PRODUCT

    def _add(self, labels: NDArray[np.int64], rows: Float32) -> None:
        self._unmap()
        self._index.add_with_ids(rows, labels)

    def _scopes(self, query: Float32, count: int, stages: int) -> list[Any]:
        return row_ranges(self._index.ntotal, stages)

    def _candidates(self, query: Float32, count: int, scope: Any = None) -> NDArray[np.int64]:
        rows = self._faiss.IDSelectorRange(*(scope or (0, self._index.ntotal)))
        return self._search_rows(query, count, self._faiss.SearchParameters(sel=rows))

    def _search_rows(self, query: Float32, count: int, parameters: Any) -> NDArray[np.int64]:
        """Labels that the index within the id map finds; its selectors are of rows."""
        rows: NDArray[np.int64] = self._index.index.search(query, count, params=parameters)[1][0]
        return self._row_labels()[rows[rows >= 0]]  # Faiss pads with -1

    def _row_labels(self) -> NDArray[np.int64]:
        """A view: the labels by row, ascending."""
        labels: NDArray[np.int64] = self._faiss.rev_swig_ptr(self._index.id_map.data(), self._index.ntotal)
        return labels

    def _vectors(self, labels: NDArray[np.int64]) -> Float32:
        rows: Float32 = self._index.reconstruct_batch(labels)
        return rows

    def _remove(self, labels: NDArray[np.int64]) -> None:
        self._unmap()
        self._index.remove_ids(labels)

    def _write(self, path: Path) -> None:
        self._faiss.write_index(self._index, str(path))

    def _read(self, path: Path, manifest: Manifest, mmap: bool) -> None:
        index = self._faiss.read_index(str(path), self._map_flag(manifest) if mmap else 0)
        if (
            index.d != self.dim
            or index.metric_type != self._faiss_metric()
            or not self._holds(index, manifest)
        ):
            raise RetrievalError(f"{path} holds another index than its manifest names; build it anew")
        self._index, self._mapped = index, mmap

    def _map_flag(self, manifest: Manifest) -> int:
        return int(self._faiss.IO_FLAG_MMAP_IFC)

    def _holds(self, index: Any, manifest: Manifest) -> bool:
        return bool(index.ntotal == len(manifest.ids))

    def _unmap(self) -> None:
        """Read a mapped index into memory: Faiss cannot change it in place."""
        if self._mapped:
            self._index = self._faiss.deserialize_index(self._faiss.serialize_index(self._index))
            self._mapped = False


class FaissHnswIndex(FaissFlatIndex):
    """Faiss's HNSW with :class:`GraphOptions`. A search may find fewer than k.

    Removed vectors stay as nodes of the graph that no search returns. Once more than 30 % of the nodes are
    such, :meth:`remove` builds the graph anew, which takes as long as adding what is left. Until then a
    search goes as far as it needs to; under ``ip`` it may miss more, if what was near most queries is gone.
    """

    kind: ClassVar[str] = "faiss-hnsw"
    scans: ClassVar[bool] = False

    def __init__(self, dim: int, metric: str = "cosine", **options: int) -> None:
        self._graph = GraphOptions(**options)
        super().__init__(dim, metric)

    def _make(self) -> Any:
        graph = self._faiss.IndexHNSWFlat(self.dim, self._graph.links, self._faiss_metric())
        graph.hnsw.efConstruction = self._graph.ef_construction
        return graph

    def _scopes(self, query: Float32, count: int, stages: int) -> list[Any]:
        return self._graph.ladder(count, stages)

    def _candidates(self, query: Float32, count: int, scope: Any = None) -> NDArray[np.int64]:
        breadth, nodes = scope or max(self._graph.ef_search, count), self._index.ntotal
        wider, whole = -(-breadth * nodes // len(self._labels)), nodes == len(self._labels)
        while True:
            parameters = self._faiss.SearchParametersHNSW(efSearch=wider)
            found = self._search_rows(query, count if whole else wider, parameters)
            kept = [label for label in found.tolist() if label in self._ids]
            if whole or len(kept) >= max(count, (1 - _REMOVED_SHARE) * breadth) or wider >= nodes:
                return np.array(kept[:count], np.int64)
            wider = min(2 * wider, nodes)

    def _remove(self, labels: NDArray[np.int64]) -> None:
        kept = np.setdiff1d(np.fromiter(self._ids, np.int64), labels)
        if len(kept) >= (1 - _REMOVED_SHARE) * self._index.ntotal:
            return
        index = self._faiss.IndexIDMap2(self._make())
        if len(kept):
            index.add_with_ids(self._vectors(kept), kept)
        self._index, self._mapped = index, False

    def options(self) -> dict[str, Any]:
        return asdict(self._graph)

    def _holds(self, index: Any, manifest: Manifest) -> bool:
        return bool(index.ntotal >= len(manifest.ids))
