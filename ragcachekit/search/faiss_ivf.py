"""Faiss's inverted lists over full vectors: the lists nearest to a query are scanned."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ragcachekit.config import positive
from ragcachekit.search.checks import Float32
from ragcachekit.search.faiss_index import FaissFlatIndex
from ragcachekit.search.manifest import Manifest

_VECTORS_PER_LIST = 39  # Faiss's k-means wants at least as many
_GROWTH = 4  # times the vectors of the last training, at which it is repeated


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
        self._fill(self._make(), labels, rows)
        self._trained = len(rows)
        self._moves += 1

    def _fill(self, centroids: Any, labels: NDArray[np.int64], rows: Float32) -> None:
        """Make lists around these centroids, or around trained ones if there are none."""
        index = self._faiss.IndexIVFFlat(centroids, self.dim, self._lists, self._faiss_metric())
        index.train(rows)
        index.set_direct_map_type(self._faiss.DirectMap.Hashtable)  # so that vectors are found by label
        index.add_with_ids(rows, labels)
        self._index, self._mapped = index, False

    def _unmap(self) -> None:
        if not self._mapped or not self._trained:
            super()._unmap()
            return
        centroids, labels = self._make(), np.fromiter(self._ids, np.int64)
        centroids.add(self._index.quantizer.reconstruct_n(0, self._lists))
        self._fill(centroids, labels, self._vectors(labels))

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

    def _map_flag(self, manifest: Manifest) -> int:
        return int(self._faiss.IO_FLAG_MMAP) if manifest.state["trained"] else super()._map_flag(manifest)

    def _read(self, path: Path, manifest: Manifest, mmap: bool) -> None:
        super()._read(path, manifest, mmap)
        self._trained = manifest.state["trained"]
