"""Vector indexes of Faiss (the exact scan, and HNSW) and of hnswlib (HNSW)."""

from __future__ import annotations

import importlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ragcachekit.config import positive
from ragcachekit.errors import RetrievalError, missing_extra
from ragcachekit.retrieval.distances import Float32
from ragcachekit.retrieval.index import Labels, VectorIndex

_START = 1024  # capacity of hnswlib's empty index; doubled when full
_REMOVED_SHARE = 0.3  # of a Faiss graph's nodes, beyond which it is built anew


@dataclass(frozen=True)
class GraphOptions:
    """Settings of an HNSW graph: neighbours per node (M), breadth while building and while searching."""

    links: int = 32
    ef_construction: int = 200
    ef_search: int = 64

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            object.__setattr__(self, name, positive(name, value))

    def breadths(self, count: int, stages: int) -> list[int | None]:
        """Breadths of a staged search for ``count`` candidates: doubling, and None for the full one."""
        return [*sorted({max(count, self.ef_search >> step) for step in range(stages)})[:-1], None]


class FaissFlatIndex(VectorIndex):
    """Faiss's exact scan. Needs the extra ``faiss``."""

    kind: ClassVar[str] = "faiss-flat"

    def __init__(self, dim: int, metric: str = "cosine") -> None:
        super().__init__(dim, metric)
        self._faiss = _load_library("faiss", "faiss-cpu")
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

    def _write(self, path: Path) -> None:
        self._faiss.write_index(self._index, str(path))

    def _read(self, path: Path, labels: Labels) -> None:
        index = self._faiss.read_index(str(path))
        if index.d != self.dim or index.metric_type != self._metric or index.ntotal < len(labels):
            raise RetrievalError(f"{path} holds another index than its manifest names; build it anew")
        self._index = index


class FaissHnswIndex(FaissFlatIndex):
    """Faiss's HNSW with :class:`GraphOptions`. A search may find fewer than k.

    Removed vectors stay as nodes of the graph that no search returns. Once more than 30 % of the nodes are
    such, :meth:`remove` builds the graph anew, which takes as long as adding what is left.
    """

    kind: ClassVar[str] = "faiss-hnsw"
    scans: ClassVar[bool] = False

    def __init__(self, dim: int, metric: str = "cosine", **options: int) -> None:
        self._graph = GraphOptions(**options)
        self._removed: Labels = np.empty(0, np.int64)
        super().__init__(dim, metric)

    def _make(self) -> Any:
        graph = self._faiss.IndexHNSWFlat(self.dim, self._graph.links, self._metric)
        graph.hnsw.efConstruction = self._graph.ef_construction
        return graph

    def _scopes(self, query: Float32, count: int, stages: int) -> list[Any]:
        return self._graph.breadths(count, stages)

    def _candidates(self, query: Float32, count: int, scope: Any = None) -> Labels:
        breadth, nodes = scope or max(self._graph.ef_search, count), self._index.ntotal
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

    def _read(self, path: Path, labels: Labels) -> None:
        super()._read(path, labels)
        self._removed = np.setdiff1d(self._row_labels(), labels)

    def options(self) -> dict[str, Any]:
        return asdict(self._graph)


class HnswlibIndex(VectorIndex):
    """hnswlib's HNSW with :class:`GraphOptions`. Removed vectors are marked and skipped."""

    kind: ClassVar[str] = "hnswlib"
    scans: ClassVar[bool] = False

    def __init__(self, dim: int, metric: str = "cosine", *, seed: int = 0, **options: int) -> None:
        super().__init__(dim, metric)
        self._graph = GraphOptions(**options)
        self._seed = int(seed)
        self._library = _load_library("hnswlib", "hnswlib")
        self._index = self._make()
        self._index.init_index(_START, self._graph.links, self._graph.ef_construction, self._seed)

    def _make(self) -> Any:
        return self._library.Index(space="l2" if self.metric == "l2" else "ip", dim=self.dim)

    def _add(self, labels: Labels, rows: Float32) -> None:
        needed = self._index.get_current_count() + len(labels)
        room = self._index.get_max_elements()
        if needed > room:
            self._index.resize_index(max(needed, 2 * room))
        self._index.add_items(rows, labels, num_threads=1)  # one thread: the same graph every time

    def _scopes(self, query: Float32, count: int, stages: int) -> list[Any]:
        return self._graph.breadths(count, stages)

    def _candidates(self, query: Float32, count: int, scope: Any = None) -> Labels:
        self._index.set_ef(scope or max(count, self._graph.ef_search))
        while True:
            try:
                labels = self._index.knn_query(query, k=count, num_threads=1)[0][0]
                return np.asarray(labels, np.int64)
            except RuntimeError:  # found fewer than count, which hnswlib cannot return
                if count == 1:
                    return np.empty(0, np.int64)
                self._index.set_ef(self._index.get_current_count())
                count = (count + 1) // 2

    def _vectors(self, labels: Labels) -> Float32:
        return np.asarray(self._index.get_items(labels), np.float32).reshape(-1, self.dim)

    def _remove(self, labels: Labels) -> None:
        for label in labels.tolist():
            self._index.mark_deleted(label)

    def options(self) -> dict[str, Any]:
        return {**asdict(self._graph), "seed": self._seed}

    def _write(self, path: Path) -> None:
        self._index.save_index(str(path))

    def _read(self, path: Path, labels: Labels) -> None:
        index = self._make()
        index.load_index(str(path))
        if index.get_current_count() < len(labels):
            raise RetrievalError(f"{path} holds fewer vectors than its manifest says; build it anew")
        self._index = index


def _load_library(name: str, package: str) -> Any:
    """The module of an extra, or ImportError with the package and the extra that install it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"this index needs {name}: {missing_extra(name, package)}") from error
