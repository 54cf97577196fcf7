"""HNSW graphs: hnswlib's index, which can remove, and the settings that it shares with Faiss's."""

from __future__ import annotations

import importlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ragcachekit.config import positive
from ragcachekit.errors import RetrievalError, missing_extra
from ragcachekit.retrieval.distances import Float32
from ragcachekit.retrieval.index import VectorIndex
from ragcachekit.retrieval.index_files import Manifest

_START = 1024  # capacity of the empty index; doubled when full


@dataclass(frozen=True)
class GraphOptions:
    """Settings of an HNSW graph: neighbours per node (M), breadth while building and while searching."""

    links: int = 32
    ef_construction: int = 200
    ef_search: int = 64

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            object.__setattr__(self, name, positive(name, value))

    def ladder(self, count: int, stages: int) -> list[int | None]:
        """Breadths of a staged search for ``count`` candidates: doubling, and None for the full one."""
        return [*sorted({max(count, self.ef_search >> step) for step in range(stages)})[:-1], None]


class HnswlibIndex(VectorIndex):
    """hnswlib's HNSW with :class:`GraphOptions`. Removed vectors are marked and skipped."""

    kind: ClassVar[str] = "hnswlib"
    scans: ClassVar[bool] = False

    def __init__(self, dim: int, metric: str = "cosine", *, seed: int = 0, **options: int) -> None:
        super().__init__(dim, metric)
        self._graph = GraphOptions(**options)
        self._seed = int(seed)
        self._library = load_library("hnswlib", "hnswlib", "hnswlib")
        self._index = self._make()
        self._index.init_index(_START, self._graph.links, self._graph.ef_construction, self._seed)

    def _make(self) -> Any:
        return self._library.Index(space="l2" if self.metric == "l2" else "ip", dim=self.dim)

    def _add(self, labels: NDArray[np.int64], rows: Float32) -> None:
        needed = self._index.get_current_count() + len(labels)
        room = self._index.get_max_elements()
        if needed > room:
            self._index.resize_index(max(needed, 2 * room))
        self._index.add_items(rows, labels, num_threads=1)  # one thread: the same graph every time

    def _scopes(self, query: Float32, count: int, stages: int) -> list[Any]:
        return self._graph.ladder(count, stages)

    def _candidates(self, query: Float32, count: int, scope: Any = None) -> NDArray[np.int64]:
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

    def _vectors(self, labels: NDArray[np.int64]) -> Float32:
        return np.asarray(self._index.get_items(labels), np.float32).reshape(-1, self.dim)

    def _remove(self, labels: NDArray[np.int64]) -> None:
        for label in labels.tolist():
            self._index.mark_deleted(label)

    def options(self) -> dict[str, Any]:
        return {**asdict(self._graph), "seed": self._seed}

    def _write(self, path: Path) -> None:
        self._index.save_index(str(path))

    def _read(self, path: Path, manifest: Manifest) -> None:
        index = self._make()
        index.load_index(str(path))
        if index.get_current_count() < len(manifest.ids):
            raise RetrievalError(f"{path} holds fewer vectors than its manifest says; build it anew")
        self._index = index


def load_library(module: str, extra: str, package: str) -> Any:
    """The module, or ImportError with the package and the extra that install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"this index needs {module}: {missing_extra(extra, package)}") from error
