"""Faiss's inverted lists as a :class:`~ragcachekit.retrieval.index.VectorIndex`, for staged searches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ragcachekit.retrieval.distances import Float32
from ragcachekit.retrieval.index import Labels, VectorIndex


@dataclass(frozen=True, eq=False)
class _Probes:
    """Lists ``[1, n]`` to scan, and the query's distances to their centroids."""

    lists: Labels
    distances: Float32


class FaissIvfIndex(VectorIndex):
    """``lists`` clusters, trained by the first add, of which a search scans the ``probes`` nearest.

    A search in stages goes through these lists part by part, the nearest first.
    """

    kind: ClassVar[str] = "faiss-ivf"

    def __init__(self, dim: int, metric: str = "cosine", *, lists: int = 256, probes: int = 16) -> None:
        self._lists, self._probes = lists, probes
        super().__init__(dim, metric)
        flat = self._faiss.IndexFlat(dim, self._metric)
        self._index = self._faiss.IndexIVFFlat(flat, dim, lists, self._metric)
        self._index.set_direct_map_type(self._faiss.DirectMap.Hashtable)  # so that vectors are found by label

    def _add_rows(self, labels: Labels, rows: Float32) -> None:
        if not self._index.is_trained:
            self._index.train(rows)
        self._index.add_with_ids(rows, labels)

    def _scopes(self, query: Float32, count: int, stages: int) -> list[Any]:
        probes = self._nearest_lists(query)
        parts = np.array_split(np.arange(probes.lists.size), stages)
        return [_Probes(probes.lists[:, at], probes.distances[:, at]) for at in parts if at.size]

    def _candidates(self, query: Float32, count: int, scope: Any = None) -> Labels:
        probes = scope or self._nearest_lists(query)
        # the wrapper without _c takes no parameters
        parameters = self._faiss.SearchParametersIVF(nprobe=probes.lists.size)
        distances, labels = np.empty(count, np.float32), np.empty(count, np.int64)
        inputs = np.ascontiguousarray(probes.lists), np.ascontiguousarray(probes.distances)
        pointer = self._faiss.swig_ptr
        self._index.search_preassigned_c(
            1, pointer(query), count, *map(pointer, (*inputs, distances, labels)), False, parameters
        )
        return labels[labels >= 0]

    def _nearest_lists(self, query: Float32) -> _Probes:
        distances, lists = self._index.quantizer.search(query, min(self._probes, self._lists))
        return _Probes(lists, distances)
