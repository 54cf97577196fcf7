"""Faiss: the exact scan, the graph (HNSW), and inverted lists (IVF), all over full vectors."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ragcachekit.config import positive
from ragcachekit.errors import RetrievalError
from ragcachekit.retrieval.distances import Float32
from ragcachekit.retrieval.hnswlib_index import GraphOptions, load_library
from ragcachekit.retrieval.index import VectorIndex, row_ranges
from ragcachekit.retrieval.index_files import Manifest

_REMOVED_SHARE = 0.3  # of a graph's rows, beyond which it is built anew
_VECTORS_PER_LIST = 39  # Faiss's k-means wants at least as many
_GROWTH = 4  # times the vectors of the last training, at which it is repeated


class FaissFlatIndex(VectorIndex):
    """Faiss's exact scan. Needs the extra ``faiss``."""

    kind: ClassVar[str] = "faiss-flat"

    def __init__(self, dim: int, metric: str = "cosine") -> None:
        super().__init__(dim, metric)
        self._faiss = load_library("faiss", "faiss", "faiss-cpu")
        self._index = self._faiss.IndexIDMap2(self._make())

    def _make(self) -> Any:
        return self._faiss.IndexFlat(self.dim, self._faiss_metric())

    def _faiss_metric(self) -> Any:
        return self._faiss.METRIC_L2 if self.metric == "l2" else self._faiss.METRIC_INNER_PRODUCT

    def _add(self, labels: NDArray[np.int64], rows: Float32) -> None:
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
        self._index.remove_ids(labels)

    def _write(self, path: Path) -> None:
        self._faiss.write_index(self._index, str(path))

    def _read(self, path: Path, manifest: Manifest) -> None:
        index = self._faiss.read_index(str(path))
        if (
            index.d != self.dim
            or index.metric_type != self._faiss_metric()
            or not self._holds(index, manifest)
        ):
            raise RetrievalError(f"{path} holds another index than its manifest names; build it anew")
        self._index = index

    def _holds(self, index: Any, manifest: Manifest) -> bool:
        return bool(index.ntotal == len(manifest.ids))


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
        self._index = index

    def options(self) -> dict[str, Any]:
        return asdict(self._graph)

    def _holds(self, index: Any, manifest: Manifest) -> bool:
        return bool(index.ntotal >= len(manifest.ids))


@dataclass(frozen=True, eq=False)
class _Probes:
    """Lists ``[1, n]`` to scan, the query's distances to their centroids, and the first label too new."""

    lists: NDArray[np.int64]
    distances: Float32
    bound: int


class FaissIvfIndex(FaissFlatIndex):
    """Faiss's IndexIVFFlat: ``lists`` clusters, of which a search scans the ``probes`` nearest.

    All vectors are scanned until there are 39 per list. The add that reaches this number trains the
    clusters, and an add that reaches four times the trained number trains them again. Such an add takes
    seconds, and searches wait for it.
    """

    kind: ClassVar[str] = "faiss-ivf"

    def __init__(self, dim: int, metric: str = "cosine", *, lists: int = 256, probes: int = 16) -> None:
        self._lists, self._probes = positive("lists", lists), positive("probes", probes)
        self._trained = 0
        super().__init__(dim, metric)

    def _add(self, labels: NDArray[np.int64], rows: Float32) -> None:
        if self._index.ntotal + len(rows) < max(_VECTORS_PER_LIST * self._lists, _GROWTH * self._trained):
            super()._add(labels, rows)
            return
        held = np.fromiter(self._ids, np.int64)
        if len(held):
            labels, rows = np.concatenate([held, labels]), np.concatenate([self._vectors(held), rows])
        index = self._faiss.IndexIVFFlat(self._make(), self.dim, self._lists, self._faiss_metric())
        index.train(rows)
        index.set_direct_map_type(self._faiss.DirectMap.Hashtable)  # so that vectors are found by label
        index.add_with_ids(rows, labels)
        self._index, self._trained = index, len(rows)
        self._moves += 1

    def _scopes(self, query: Float32, count: int, stages: int) -> list[Any]:
        if not self._trained:
            return super()._scopes(query, count, stages)
        probes = self._nearest_lists(query)
        parts = zip(
            *(np.array_split(x, stages, axis=1) for x in (probes.lists, probes.distances)), strict=True
        )
        return [_Probes(lists, distances, probes.bound) for lists, distances in parts if lists.size]

    def _candidates(self, query: Float32, count: int, scope: Any = None) -> NDArray[np.int64]:
        if not self._trained:
            return super()._candidates(query, count, scope)
        probes = scope or self._nearest_lists(query)
        # the wrapper without _c takes no parameters
        older = self._faiss.IDSelectorRange(0, probes.bound) if probes.bound < self._next_label else None
        parameters = self._faiss.SearchParametersIVF(nprobe=probes.lists.size, sel=older)
        distances, labels = np.empty(count, np.float32), np.empty(count, np.int64)
        inputs = np.ascontiguousarray(probes.lists), np.ascontiguousarray(probes.distances)
        pointer = self._faiss.swig_ptr
        self._index.search_preassigned_c(
            1, pointer(query), count, *map(pointer, (*inputs, distances, labels)), False, parameters
        )
        return labels[labels >= 0]

    def _nearest_lists(self, query: Float32) -> _Probes:
        distances, lists = self._index.quantizer.search(query, min(self._probes, self._lists))
        return _Probes(lists, distances, self._next_label)

    def options(self) -> dict[str, Any]:
        return {"lists": self._lists, "probes": self._probes}

    def _state(self) -> dict[str, int]:
        return {"trained": self._trained}

    def _read(self, path: Path, manifest: Manifest) -> None:
        super()._read(path, manifest)
        self._trained = manifest.state["trained"]
