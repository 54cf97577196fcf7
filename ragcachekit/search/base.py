"""The contract of every vector index, and what they share: ids, checks, a lock, distances, saving."""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ragcachekit.config import positive
from ragcachekit.errors import RetrievalError
from ragcachekit.search.checks import DocumentId, Float32, as_ids, as_rows, check_metric
from ragcachekit.search.manifest import Manifest, write_index

_SPARE = 8  # candidates beyond k, so that float32 rounding does not decide who is among the k


class SearchResult(NamedTuple):
    """Ids of the nearest documents, nearest first, and their distances.

    ``scores`` are ``l2`` ||q - x|| (not squared), ``cosine`` 1 - q.x / (||q|| ||x||) or ``ip`` -q.x, in
    float64. Equal ones are ordered by id (ints before strings); which of many equal ones are among the k is
    up to the index.
    """

    ids: tuple[DocumentId, ...]
    scores: tuple[float, ...]


class VectorIndex(ABC):
    """Vectors by id, over a library that has int64 labels only. All indexes promise:

    - ``search`` returns min(k, len) distinct ids of added and not removed vectors, nearest first;
      an approximate index may miss some and return fewer, never an id it does not hold.
    - A call that raises has changed nothing.
    - All methods are thread safe; calls run one after the other.
    - What ``save`` wrote loads as the same index or raises RetrievalError, if one bit was changed.

    Labels count up and are never used twice. Subclasses hold the vectors and propose candidates; the
    distances are computed here. Under ``cosine`` unit vectors are stored.
    """

    kind: ClassVar[str]
    """Name in the registry."""

    def __init__(self, dim: int, metric: str = "cosine") -> None:
        self.dim = positive("dim", dim)
        self.metric = check_metric(metric)
        self._lock = threading.Lock()  # Faiss HNSW crashes when a search runs beside an add
        self._labels: dict[DocumentId, int] = {}
        self._ids: dict[int, DocumentId] = {}
        self._next_label = 0

    def __len__(self) -> int:
        return len(self._labels)

    def __contains__(self, one: object) -> bool:
        return one in self._labels

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
            for one, label in zip(frozen, labels.tolist(), strict=True):
                self._labels[one] = label
                self._ids[label] = one

    def search(self, embedding: ArrayLike, k: int) -> SearchResult:
        """The k nearest documents; RetrievalError if the index is empty or the embedding cannot be used."""
        wanted = positive("k", k)
        if np.ndim(embedding) != 1:
            raise RetrievalError(
                f"expected one embedding [{self.dim}], got shape {list(np.shape(embedding))}"
            )
        query = as_rows(np.asarray(embedding)[None], self.dim, self.metric)
        with self._lock:
            size = len(self._labels)
            if not size:
                raise RetrievalError("the index is empty; add documents first")
            candidates = self._candidates(query, min(wanted + _SPARE, size))
            scores = self._distances(query[0], self._vectors(candidates))
            ids = [self._ids[label] for label in candidates.tolist()]
        order = sorted(range(len(ids)), key=lambda i: (scores[i], isinstance(ids[i], str), ids[i]))[:wanted]
        return SearchResult(tuple(ids[i] for i in order), tuple(scores[i] for i in order))

    def remove(self, ids: Sequence[DocumentId]) -> int:
        """Drop the vectors of these ids; returns how many were known. RetrievalError if it cannot remove."""
        if isinstance(ids, str):
            raise TypeError("ids must be a sequence of ids, not one string")
        with self._lock:
            known = [one for one in dict.fromkeys(ids) if one in self._labels]
            if known:
                self._remove(np.array([self._labels[one] for one in known], np.int64))
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
            manifest = Manifest(self.kind, self.dim, self.metric, self.options(), self._next_label, ids)
            write_index(Path(path), manifest, self._write)

    def restore(self, data: Path, manifest: Manifest, *, mmap: bool = False) -> None:
        """Take over a verified data file and its ids; called by the registry's ``load_index``."""
        with self._lock:
            self._read(data, len(manifest.ids))
            self._next_label = manifest.next_label
            self._ids = dict(manifest.ids)
            self._labels = {one: label for label, one in manifest.ids}

    def _distances(self, query: Float32, rows: Float32) -> list[float]:
        wide, keys = query.astype(np.float64), rows.astype(np.float64)
        if self.metric == "l2":
            gaps = keys - wide
            distances = np.sqrt(np.einsum("ij,ij->i", gaps, gaps))
        else:
            distances = (0.0 if self.metric == "ip" else 1.0) - np.einsum("ij,j->i", keys, wide)
        return list(distances.tolist())

    def options(self) -> dict[str, Any]:
        """Constructor arguments besides dim and metric, as JSON."""
        return {}

    @abstractmethod
    def _add(self, labels: NDArray[np.int64], rows: Float32) -> None:
        """Hold ``rows`` under ``labels``, or raise and hold none."""

    @abstractmethod
    def _candidates(self, query: Float32, count: int) -> NDArray[np.int64]:
        """Labels of about the ``count`` nearest to ``query`` ``[1, dim]``, nearest first, no -1."""

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
    def _read(self, path: Path, count: int) -> None:
        """Read what ``_write`` wrote; ``count`` vectors are to be in it."""
