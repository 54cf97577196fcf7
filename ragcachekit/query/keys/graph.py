"""An approximate search among many keys: hnswlib's graph over what bounds their distances."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Any

import numpy as np

from ragcachekit.errors import missing_extra
from ragcachekit.query.keys.leading import LeadingColumns
from ragcachekit.query.metrics import Float32, Float64, Metric

KEYS = ("auto", "exact", "graph")

_GRAPH_CAPACITY = 20_000  # from which on "auto" uses graphs
_COLUMNS = 127  # with the norm of the rest: 128
_LINKS = 16  # hnswlib's M
_EF_CONSTRUCTION = 100
_EF_SEARCH = 64
_CANDIDATES = 16
_FIRST_ROOM = 1024


def uses_graph(keys: str, capacity: int) -> bool:
    """Whether a cache of this capacity uses graphs; ValueError for unknown ``keys``, ImportError as below."""
    if keys not in KEYS:
        raise ValueError(f"unknown keys {keys!r}; known: {', '.join(KEYS)}")
    if keys == "graph":
        load_hnswlib()
        return True
    return keys == "auto" and capacity >= _GRAPH_CAPACITY and find_spec("hnswlib") is not None


def load_hnswlib() -> Any:
    """The module hnswlib, or ImportError with the extra that installs it."""
    try:
        return importlib.import_module("hnswlib")
    except ImportError as error:
        install = missing_extra("hnswlib", "hnswlib")
        raise ImportError(f"keys='graph' needs hnswlib: {install}, or use keys='exact'") from error


class KeyGraph:
    """Keys by serial number; the nearest by a lower bound of the distance. Not thread safe.

    The vectors in the graph are the keys' leading columns and the norm of the rest. Their Euclidean
    distance is never above that of the keys. They are built and searched in a fraction of the time of
    full vectors. Removed keys are marked, and their places reused by the next ones.
    """

    def __init__(self, dim: int, metric: Metric, most: int) -> None:
        self._columns = LeadingColumns(0, dim, metric, min(_COLUMNS, dim))
        self._most, self._room, self._marked = most, min(_FIRST_ROOM, most), 0
        self._index = load_hnswlib().Index(space="l2", dim=self._columns.columns + 1)
        self._index.init_index(
            self._room, M=_LINKS, ef_construction=_EF_CONSTRUCTION, random_seed=0, allow_replace_deleted=True
        )
        self._index.set_ef(_EF_SEARCH)

    def add(self, serials: list[int], rows: Float32, squares: Float64) -> None:
        """Add keys ``[n, dim]`` with their squared norms."""
        needed = self._index.get_current_count() + len(serials) - self._marked
        if needed > self._room:
            self._room = min(self._most, max(needed, 2 * self._room))
            self._index.resize_index(self._room)
        self._index.add_items(
            self._vectors(rows, squares), serials, num_threads=1, replace_deleted=bool(self._marked)
        )
        self._marked = max(0, self._marked - len(serials))

    def remove(self, serial: int) -> None:
        """Take a key out."""
        self._index.mark_deleted(serial)
        self._marked += 1

    def candidates(self, queries: Float32, squares: Float64) -> list[list[int]] | None:
        """Serial numbers of near keys for each row of ``queries``; None if the graph finds too few."""
        try:
            found = self._index.knn_query(self._vectors(queries, squares), k=_CANDIDATES, num_threads=1)[0]
        except RuntimeError:  # what hnswlib raises then
            return None
        serials: list[list[int]] = found.astype(np.int64).tolist()
        return serials

    def _vectors(self, rows: Float32, squares: Float64) -> Float32:
        return np.ascontiguousarray(self._columns.parts(rows, squares)[:, :-1])
