"""Vector indexes of Faiss: the exact scan, and the graph (HNSW)."""

from __future__ import annotations

import importlib
from typing import Any, ClassVar

import numpy as np

from ragcachekit.errors import missing_extra
from ragcachekit.retrieval.distances import Float32
from ragcachekit.retrieval.index import Labels, VectorIndex
from ragcachekit.types import positive

_REMOVED_SHARE = 0.3  # of the graph's nodes, beyond which it is built anew


class FaissFlatIndex(VectorIndex):
    """Faiss's exact scan. Needs the extra ``faiss``."""

    kind: ClassVar[str] = "faiss-flat"

    def __init__(self, dim: int, metric: str = "cosine") -> None:
        super().__init__(dim, metric)
        try:
            self._faiss: Any = importlib.import_module("faiss")
        except ImportError as error:
            raise ImportError(f"this index needs faiss: {missing_extra('faiss', 'faiss-cpu')}") from error
        self._metric = self._faiss.METRIC_L2 if metric == "l2" else self._faiss.METRIC_INNER_PRODUCT
        self._index = self._faiss.IndexIDMap2(self._make())

    def _make(self) -> Any:
        return self._faiss.IndexFlat(self.dim, self._metric)

    def _add(self, labels: Labels, rows: Float32) -> None:
        self._index.add_with_ids(rows, labels)

    def _candidates(self, query: Float32, count: int, scope: Any = None) -> Labels:
        rows = self._faiss.IDSelectorRange(*(scope or (0, self._index.ntotal)))
        return self._search_rows(query, count, self._faiss.SearchParameters(sel=rows))

    def _search_rows(self, query: Float32, count: int, parameters: Any) -> Labels:
        """Labels that the index within the id map finds; its selectors are of rows."""
        rows: Labels = self._index.index.search(query, count, params=parameters)[1][0]
        return self._row_labels()[rows[rows >= 0]]  # Faiss pads with -1

    def _row_labels(self) -> Labels:
        """A view: the labels by row, ascending."""
        labels: Labels = self._faiss.rev_swig_ptr(self._index.id_map.data(), self._index.ntotal)
        return labels

    def _vectors(self, labels: Labels) -> Float32:
        rows: Float32 = self._index.reconstruct_batch(labels)
        return rows

    def _remove(self, labels: Labels) -> None:
        self._index.remove_ids(labels)

    def _dump(self) -> memoryview:
        return memoryview(self._faiss.serialize_index(self._index))

    def _load(self, data: memoryview, labels: Labels) -> None:
        self._index = self._faiss.deserialize_index(np.frombuffer(data, np.uint8))


class FaissHnswIndex(FaissFlatIndex):
    """Faiss's HNSW. A search may find fewer than k.

    ``links`` are the neighbours of a node (M), the others the breadth while building and while searching.

    Removed vectors stay as nodes of the graph that no search returns. Once more than 30 % of the nodes are
    such, :meth:`remove` builds the graph anew, which takes as long as adding what is left.
    """

    kind: ClassVar[str] = "faiss-hnsw"
    scans: ClassVar[bool] = False

    def __init__(
        self,
        dim: int,
        metric: str = "cosine",
        *,
        links: int = 32,
        ef_construction: int = 200,
        ef_search: int = 64,
    ) -> None:
        self._links, self._ef_search = positive("links", links), positive("ef_search", ef_search)
        self._ef_construction = positive("ef_construction", ef_construction)
        self._removed: Labels = np.empty(0, np.int64)
        super().__init__(dim, metric)

    def _make(self) -> Any:
        graph = self._faiss.IndexHNSWFlat(self.dim, self._links, self._metric)
        graph.hnsw.efConstruction = self._ef_construction
        return graph

    def _scopes(self, query: Float32, count: int, stages: int) -> list[Any]:
        breadths = {max(count, self._ef_search >> step) for step in range(stages)}
        return [*sorted(breadths)[:-1], None]  # doubling, and None for the full one

    def _candidates(self, query: Float32, count: int, scope: Any = None) -> Labels:
        breadth, nodes = scope or max(self._ef_search, count), self._index.ntotal
        rows = np.searchsorted(self._row_labels(), self._removed)
        kept = self._faiss.IDSelectorNot(self._faiss.IDSelectorBatch(rows)) if len(rows) else None
        while True:
            parameters = self._faiss.SearchParametersHNSW(efSearch=breadth, sel=kept)
            found = self._search_rows(query, count, parameters)
            if len(found) == count or breadth >= nodes:
                return found
            breadth = min(2 * breadth, nodes)

    def _remove(self, labels: Labels) -> None:
        removed = np.union1d(self._removed, labels)
        if len(removed) > _REMOVED_SHARE * self._index.ntotal:
            kept = np.setdiff1d(self._row_labels(), removed)
            index = self._faiss.IndexIDMap2(self._make())
            if len(kept):
                index.add_with_ids(self._vectors(kept), kept)
            self._index, removed = index, removed[:0]
        self._removed = removed

    def _load(self, data: memoryview, labels: Labels) -> None:
        super()._load(data, labels)
        self._removed = np.setdiff1d(self._row_labels(), labels)

    def options(self) -> dict[str, Any]:
        names = ("links", "ef_construction", "ef_search")
        return {name: getattr(self, f"_{name}") for name in names}
