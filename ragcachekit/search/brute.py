"""Plain numpy: the null implementation that every other index is compared with."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ragcachekit.errors import RetrievalError
from ragcachekit.search.base import VectorIndex
from ragcachekit.search.checks import Float32, row_ranges
from ragcachekit.search.manifest import Manifest
from ragcachekit.search.results import distances


class BruteIndex(VectorIndex):
    """All distances, in float64, every time. Exact and slow; adds and removes copy everything."""

    kind: ClassVar[str] = "brute"

    def __init__(self, dim: int, metric: str = "cosine") -> None:
        super().__init__(dim, metric)
        self._held: NDArray[np.int64] = np.empty(0, np.int64)  # sorted: labels count up
        self._rows: Float32 = np.empty((0, dim), np.float32)

    def _add(self, labels: NDArray[np.int64], rows: Float32) -> None:
        joined = np.concatenate([self._rows, rows])
        self._held = np.concatenate([self._held, labels])
        self._rows = joined

    def _scopes(self, query: Float32, count: int, stages: int) -> list[Any]:
        return row_ranges(len(self._held), stages)

    def _candidates(self, query: Float32, count: int, scope: Any = None) -> NDArray[np.int64]:
        first, last = scope or (0, len(self._held))
        order = np.argsort(distances(query[0], self._rows[first:last], self.metric), kind="stable")
        return self._held[first:last][order[:count]]

    def _vectors(self, labels: NDArray[np.int64]) -> Float32:
        return self._rows[np.searchsorted(self._held, labels)]

    def _remove(self, labels: NDArray[np.int64]) -> None:
        kept = ~np.isin(self._held, labels)
        self._held, self._rows = self._held[kept], self._rows[kept]

    def _write(self, path: Path) -> None:
        with path.open("wb") as file:
            np.save(file, self._held, allow_pickle=False)
            np.save(file, self._rows, allow_pickle=False)

    def _read(self, path: Path, manifest: Manifest, mmap: bool) -> None:
        with path.open("rb") as file:
            held, rows = np.load(file, allow_pickle=False), np.load(file, allow_pickle=False)
        if held.tolist() != [label for label, _ in manifest.ids] or rows.shape != (len(held), self.dim):
            raise RetrievalError(f"{path} holds other vectors than its manifest names; build it anew")
        self._held, self._rows = held, rows
