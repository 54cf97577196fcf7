"""Vector indexes: one contract, a plain numpy implementation, and all of them by name."""

from __future__ import annotations

import importlib
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ragcachekit.config import positive
from ragcachekit.errors import RetrievalError
from ragcachekit.retrieval.distances import Float32, check_metric
from ragcachekit.retrieval.index_files import DocumentId, Manifest, read_index, write_index

SPARE = 8
"""Candidates beyond k, so that float32 rounding does not decide which are among the k."""

_MORE = 4  # times as many, if that may not suffice
_MAX_NORM = 3e18  # beyond it float32 products overflow
_MIN_NORM = 1e-15  # below it a direction cannot be told in float32

_KINDS = {
    "brute": ("ragcachekit.retrieval.index", "BruteIndex"),
    "faiss-flat": ("ragcachekit.retrieval.faiss_index", "FaissFlatIndex"),
    "faiss-ivf": ("ragcachekit.retrieval.faiss_index", "FaissIvfIndex"),
    "faiss-hnsw": ("ragcachekit.retrieval.faiss_index", "FaissHnswIndex"),
    "hnswlib": ("ragcachekit.retrieval.hnswlib_index", "HnswlibIndex"),
}


class SearchResult(NamedTuple):
    """Ids of the nearest documents, nearest first, and their distances.

    ``scores`` are ``l2`` ||q - x|| (not squared), ``cosine`` 1 - q.x / (||q|| ||x||) or ``ip`` -q.x, in
    float64. Equal ones are ordered by id (ints before strings).
    """

    ids: tuple[DocumentId, ...]
    scores: tuple[float, ...]


class VectorIndex(ABC):
    """Vectors by id, over a library that has int64 labels only. All indexes promise:

    - ``search`` returns min(k, len) distinct ids of added and not removed vectors, nearest first;
      an approximate index may miss some and return fewer, never an id it does not hold. An index that
      scans (``brute``, ``faiss-flat``, ``faiss-ivf`` in its probed lists) is exact, ties included.
    - A call that raises has changed nothing.
    - All methods are thread safe; calls run one after the other.
    - What ``save`` wrote loads as the same index or raises RetrievalError, if one bit was changed.

    Labels count up and are never used twice. Subclasses hold the vectors and propose candidates; the
    distances are computed here. Under ``cosine`` unit vectors are stored.
    """

    kind: ClassVar[str]
    """Name in the registry."""

    scans: ClassVar[bool] = True
    """Whether candidates are the nearest of all rows in a scope, so that scopes can be merged."""

    def __init__(self, dim: int, metric: str = "cosine") -> None:
        self.dim = positive("dim", dim)
        self.metric = check_metric(metric)
        self._lock = threading.Lock()  # Faiss HNSW crashes when a search runs beside an add
        self._labels: dict[DocumentId, int] = {}
        self._ids: dict[int, DocumentId] = {}
        self._next_label = 0
        self._changes = 0
        self._moves = 0  # changes after which the scopes of a staged search do not hold

    def __len__(self) -> int:
        return len(self._labels)

    def __contains__(self, one: object) -> bool:
        return one in self._labels

    @property
    def version(self) -> int:
        """Number of calls that added or removed vectors since this object was made."""
        return self._changes

    @property
    def ids(self) -> tuple[DocumentId, ...]:
        """The ids in the order in which they were added."""
        with self._lock:
            return tuple(self._labels)

    def add(self, ids: Sequence[DocumentId], embeddings: ArrayLike) -> None:
        """Add vectors ``[n, dim]`` under new ids.

        ValueError for known or repeated ids, RetrievalError for vectors that cannot be used (NaN, another
        width, zero under cosine).
        """
        if not len(ids) and not np.size(embeddings):
            return
        rows = as_rows(embeddings, self.dim, self.metric)
        frozen = as_ids(ids, len(rows))
        with self._lock:
            held = next((one for one in frozen if one in self._labels), None)
            if held is not None:
                raise ValueError(f"id {held!r} is in the index already; remove it first")
            labels = np.arange(self._next_label, self._next_label + len(frozen), dtype=np.int64)
            self._add(labels, rows)
            self._next_label += len(frozen)
            self._changes += 1
            for one, label in zip(frozen, labels.tolist(), strict=True):
                self._labels[one] = label
                self._ids[label] = one

    def search(self, embedding: ArrayLike, k: int) -> SearchResult:
        """The k nearest documents; RetrievalError if the index is empty or the embedding cannot be used."""
        query, wanted = self._query(embedding), positive("k", k)
        with self._lock:
            return self._nearest(query, wanted)

    def search_stages(self, embedding: ArrayLike, k: int, stages: int = 4) -> Iterator[SearchResult]:
        """Provisional results of a search in at most ``stages`` steps; the last is what ``search`` returns.

        An index that scans goes through its rows, or its probed lists, part by part, and a graph is searched
        with growing breadth. The lock is free between steps. The last result equals that of one search at
        some moment between this call and its own: of the vectors at the beginning for an index that scans,
        at the end for a graph, or if vectors were removed meanwhile, which ends the steps by a whole search.
        Errors are those of ``search``.
        """
        query, wanted, steps = self._query(embedding), positive("k", k), positive("stages", stages)
        with self._lock:
            count = min(wanted + SPARE, self._size())
            return self._staged(query, wanted, self._scopes(query, count, steps), self._moves)

    def _staged(self, query: Float32, wanted: int, scopes: list[Any], moves: int) -> Iterator[SearchResult]:
        found = SearchResult((), ())
        for scope in scopes:
            with self._lock:
                whole = self._moves != moves
                part = self._nearest(query, wanted, None if whole else scope)
            if not self.scans or whole:
                found = part
            else:
                found = ordered(found.ids + part.ids, found.scores + part.scores, wanted)
            yield found
            if whole:
                return

    def _query(self, embedding: ArrayLike) -> Float32:
        if np.ndim(embedding) != 1:
            raise RetrievalError(
                f"expected one embedding [{self.dim}], got shape {list(np.shape(embedding))}"
            )
        return as_rows(np.asarray(embedding)[None], self.dim, self.metric)

    def _size(self) -> int:
        if not self._labels:
            raise RetrievalError("the index is empty; add documents first")
        return len(self._labels)

    def _nearest(self, query: Float32, wanted: int, scope: Any = None) -> SearchResult:
        """The nearest in a scope; more candidates are taken until rounding and ties do not matter."""
        size = self._size()
        count = min(wanted + SPARE, size)
        while True:
            labels = self._candidates(query, count, scope)
            rows = self._vectors(labels)
            scores = distances(query[0], rows, self.metric)
            if len(labels) < count or count == size or not self.scans:
                break
            if sorted(scores)[wanted - 1] + rounding(query[0], rows, self.metric) < max(scores):
                break
            count = min(_MORE * count, size)
        return ordered(tuple(self._ids[label] for label in labels.tolist()), tuple(scores), wanted)

    def remove(self, ids: Sequence[DocumentId]) -> int:
        """Drop the vectors of these ids; returns how many were known. RetrievalError if it cannot remove."""
        if isinstance(ids, str):
            raise TypeError("ids must be a sequence of ids, not one string")
        with self._lock:
            known = [one for one in dict.fromkeys(ids) if one in self._labels]
            if known:
                self._remove(np.array([self._labels[one] for one in known], np.int64))
                self._moves += 1
                self._changes += 1
            for one in known:
                del self._ids[self._labels.pop(one)]
            return len(known)

    def vectors(self, ids: Sequence[DocumentId]) -> Float32:
        """The stored vectors ``[n, dim]`` of these ids; RetrievalError for an id that is not there."""
        with self._lock:
            missing = next((one for one in ids if one not in self._labels), None)
            if missing is not None:
                raise RetrievalError(f"id {missing!r} is not in the index")
            return self._vectors(np.array([self._labels[one] for one in ids], np.int64))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the index: a manifest at ``path``, and beside it a data file named by its SHA-256."""
        with self._lock:
            ids = tuple(sorted(self._ids.items()))
            manifest = Manifest(
                self.kind, self.dim, self.metric, self.options(), self._next_label, ids, self._state()
            )
            write_index(Path(path), manifest, self._write)

    def restore(self, data: Path, manifest: Manifest) -> None:
        """Take over a verified data file and its ids; called by the registry's ``load_index``."""
        with self._lock:
            self._read(data, manifest)
            self._next_label = manifest.next_label
            self._ids = dict(manifest.ids)
            self._labels = {one: label for label, one in manifest.ids}

    def options(self) -> dict[str, Any]:
        """Constructor arguments besides dim and metric, as JSON."""
        return {}

    def _state(self) -> dict[str, int]:
        """What else is needed to go on after loading."""
        return {}

    @abstractmethod
    def _add(self, labels: NDArray[np.int64], rows: Float32) -> None:
        """Hold ``rows`` under ``labels``, or raise and hold none."""

    @abstractmethod
    def _scopes(self, query: Float32, count: int, stages: int) -> list[Any]:
        """At most ``stages`` scopes of a staged search; :attr:`scans` says whether they are parts or steps.

        They hold until ``_moves`` changes.
        """

    @abstractmethod
    def _candidates(self, query: Float32, count: int, scope: Any = None) -> NDArray[np.int64]:
        """Labels of about the ``count`` nearest to ``query`` ``[1, dim]`` in a scope, nearest first."""

    @abstractmethod
    def _vectors(self, labels: NDArray[np.int64]) -> Float32:
        """The stored rows ``[n, dim]`` of these labels."""

    @abstractmethod
    def _remove(self, labels: NDArray[np.int64]) -> None:
        """Drop these labels, or raise RetrievalError."""

    @abstractmethod
    def _write(self, path: Path) -> None:
        """Write the vectors (and the graph) to a file."""

    @abstractmethod
    def _read(self, path: Path, manifest: Manifest) -> None:
        """Read what ``_write`` wrote; it must hold the manifest's labels."""


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

    def _read(self, path: Path, manifest: Manifest) -> None:
        with path.open("rb") as file:
            held, rows = np.load(file, allow_pickle=False), np.load(file, allow_pickle=False)
        if held.tolist() != [label for label, _ in manifest.ids] or rows.shape != (len(held), self.dim):
            raise RetrievalError(f"{path} holds other vectors than its manifest names; build it anew")
        self._held, self._rows = held, rows


def index_names() -> tuple[str, ...]:
    """The names that :func:`open_index` takes."""
    return tuple(sorted(_KINDS))


def open_index(name: str, dim: int, metric: str = "cosine", **options: Any) -> VectorIndex:
    """A new, empty index: one of :func:`index_names`, the width, and ``cosine``, ``l2`` or ``ip``.

    ``options`` are those of the implementation (``links``, ``ef_search``, ``probes`` ...). ValueError or
    TypeError for bad arguments; ImportError names the extra of a missing library.
    """
    if name not in _KINDS:
        raise ValueError(f"unknown index {name!r}; known: {', '.join(index_names())}")
    module, kind = _KINDS[name]
    made: VectorIndex = getattr(importlib.import_module(module), kind)(dim, metric, **options)
    return made


def load_index(path: str | os.PathLike[str]) -> VectorIndex:
    """The index that ``save`` wrote to ``path``; RetrievalError if a file is missing or damaged."""
    manifest, data = read_index(Path(path))
    index = open_index(manifest.kind, manifest.dim, manifest.metric, **manifest.options)
    try:
        index.restore(data, manifest)
    except RuntimeError as error:  # what Faiss and hnswlib raise
        raise RetrievalError(f"cannot load the index {path}: {error}") from error
    return index


def row_ranges(rows: int, stages: int) -> list[tuple[int, int]]:
    """At most ``stages`` ranges of about equal length, from first to last row."""
    bounds = np.unique(np.linspace(0, rows, stages + 1).astype(int)).tolist()
    return list(pairwise(bounds))


def as_rows(embeddings: ArrayLike, dim: int, metric: str) -> Float32:
    """Float32 ``[n, dim]``, contiguous; unit rows under cosine.

    TypeError for what are not numbers; RetrievalError for another shape, NaN, infinity, or bad norms.
    """
    try:
        raw: NDArray[Any] = np.asarray(embeddings)
    except (TypeError, ValueError) as error:
        raise TypeError(f"embeddings must be rows of equally many numbers: {error}") from error
    if raw.dtype.kind not in "fiu":
        raise TypeError(f"embeddings must hold real numbers, not {raw.dtype}")
    if raw.ndim != 2 or raw.shape[1] != dim:
        raise RetrievalError(f"expected embeddings of shape [n, {dim}], got {list(raw.shape)}")
    if not np.isfinite(raw).all():
        raise RetrievalError("the embeddings hold NaN or infinite numbers")
    wide = raw.astype(np.float64)
    return np.ascontiguousarray(_scaled(wide, metric), dtype=np.float32)


def as_ids(ids: Sequence[DocumentId], rows: int) -> tuple[DocumentId, ...]:
    """The ids as a tuple, one per row, each once."""
    if isinstance(ids, str):
        raise TypeError("ids must be a sequence of ids, not one string")
    frozen = tuple(ids)
    for one in frozen:
        if isinstance(one, bool) or not isinstance(one, str | int):
            raise TypeError(f"ids are str or int, not {type(one).__name__}; convert them first")
    if len(frozen) != rows:
        raise ValueError(f"{len(frozen)} ids for {rows} embeddings")
    if len(set(frozen)) != rows:
        raise ValueError("an id occurs twice in one call")
    return frozen


def _scaled(rows: NDArray[np.float64], metric: str) -> NDArray[np.float64]:
    largest = np.abs(rows).max(axis=1, initial=0.0)
    if rows.size and largest.max() > _MAX_NORM:
        raise RetrievalError("the embeddings' numbers exceed 3e18; scale them down")
    norms = np.sqrt(np.einsum("ij,ij->i", rows, rows))
    if rows.size and norms.max() > _MAX_NORM:
        raise RetrievalError("the embeddings' norms exceed 3e18; scale them down")
    if metric != "cosine":
        return rows
    if rows.size and norms.min() < _MIN_NORM:
        raise RetrievalError("a zero vector has no cosine distance; check the embedding model or use 'l2'")
    units: NDArray[np.float64] = rows / norms[:, None]
    return units


def ordered(ids: tuple[DocumentId, ...], scores: tuple[float, ...], wanted: int) -> SearchResult:
    """The first ``wanted`` by distance and id."""
    order = sorted(range(len(ids)), key=lambda i: (scores[i], isinstance(ids[i], str), ids[i]))[:wanted]
    return SearchResult(tuple(ids[i] for i in order), tuple(scores[i] for i in order))


def distances(query: Float32, rows: Float32, metric: str) -> list[float]:
    """Distances of ``rows`` ``[n, dim]`` to ``query`` ``[dim]``, in float64; unit rows for cosine."""
    wide, keys = query.astype(np.float64), rows.astype(np.float64)
    if metric == "l2":
        gaps = keys - wide
        found = np.sqrt(np.einsum("ij,ij->i", gaps, gaps))
    else:
        found = (0.0 if metric == "ip" else 1.0) - np.einsum("ij,j->i", keys, wide)
    return list(found.tolist())


def rounding(query: Float32, rows: Float32, metric: str) -> float:
    """By how much two float32 distances to ``rows`` may be wrong together, however they are summed."""
    vectors = rows - query if metric == "l2" else rows
    factor = 1.0 if metric == "l2" else float(np.linalg.norm(query))
    lengths = np.linalg.norm(vectors, axis=1)
    return (len(query) + SPARE) * 2.0**-23 * factor * float(lengths.max())
