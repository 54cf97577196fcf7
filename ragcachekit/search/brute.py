"""Plain numpy: the null implementation that every other index is compared with."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from ragcachekit.errors import RetrievalError
from ragcachekit.search.base import VectorIndex
from ragcachekit.search.checks import Float32


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

    def _candidates(self, query: Float32, count: int) -> NDArray[np.int64]:
        order = np.argsort(self._distances(query[0], self._rows), kind="stable")
        return self._held[order[:count]]

    def _vectors(self, labels: NDArray[np.int64]) -> Float32:
        return self._rows[np.searchsorted(self._held, labels)]

    def _remove(self, labels: NDArray[np.int64]) -> None:
        kept = ~np.isin(self._held, labels)
        self._held, self._rows = self._held[kept], self._rows[kept]

    def _write(self, path: Path) -> None:
        with path.open("wb") as file:
            np.save(file, self._held, allow_pickle=False)
            np.save(file, self._rows, allow_pickle=False)

    def _read(self, path: Path, count: int) -> None:
        with path.open("rb") as file:
            held, rows = np.load(file, allow_pickle=False), np.load(file, allow_pickle=False)
        if held.shape != (count,) or rows.shape != (count, self.dim):
            raise RetrievalError(f"{path} holds {len(held)} vectors, expected {count}")
        self._held, self._rows = held, rows
