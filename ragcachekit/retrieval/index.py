"""Vector indexes of Faiss, the exact scan and the graph (HNSW), and their files.

A saved index is one file: its SHA-256, a manifest with the ids, and the library's own data. Faiss loads data
with a flipped bit without an error, so the file is verified first.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import threading
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ragcachekit.errors import RetrievalError, missing_extra
from ragcachekit.files import parse_json, read_regular, replace_file
from ragcachekit.retrieval.distances import Float32, as_rows, check_metric
from ragcachekit.types import positive

DocumentId: TypeAlias = str | int
Labels: TypeAlias = NDArray[np.int64]

_SPARE = 8  # candidates beyond k, so that float32 rounding does not decide which are among the k
_FORMAT = 4
_BREADTHS = 4  # of a graph's search, each four times the last; narrower ones are mostly wrong
_REMOVED_SHARE = 0.3  # of the graph's nodes, beyond which it is built anew


class SearchResult(NamedTuple):
    """Ids of the nearest documents, nearest first, and their distances.

    ``scores`` are ``l2`` ||q - x|| (not squared), ``cosine`` 1 - q.x / (||q|| ||x||) or ``ip`` -q.x, in
    float64. Equal ones are ordered by id (ints before strings).
    """

    ids: tuple[DocumentId, ...]
    scores: tuple[float, ...]


class VectorIndex:
    """Vectors by id, in Faiss's exact scan. Needs the extra ``faiss``. This index and its subclasses promise:

    - ``search`` returns min(k, len) distinct ids of added and not removed vectors, nearest first;
      an approximate index may miss some and return fewer, never an id it does not hold. The scan is
      exact; of more than eight equal ones at the end it returns any.
    - A call that raises has changed nothing.
    - All methods are thread safe; calls run one after the other.
    - What ``save`` wrote loads as the same index or raises RetrievalError, if one bit was changed.

    Faiss knows vectors by labels, which count up and are never used twice, and proposes candidates, whose
    distances are computed here. Under ``cosine`` unit vectors are stored.
    """

    kind: ClassVar[str] = "faiss-flat"
    """Name that :func:`open_index` takes."""

    scans: ClassVar[bool] = True
    """Whether candidates are the nearest of all rows in a scope, so that scopes can be merged."""

    def __init__(self, dim: int, metric: str = "cosine") -> None:
        self.dim = positive("dim", dim)
        self.metric = check_metric(metric)
        self._lock = threading.Lock()  # Faiss HNSW crashes when a search runs beside an add
        self._labels: dict[DocumentId, int] = {}
        self._ids: dict[int, DocumentId] = {}
        self._next_label = 0
        self._version = 0
        try:
            self._faiss: Any = importlib.import_module("faiss")
        except ImportError as error:
            raise ImportError(f"this index needs faiss: {missing_extra('faiss', 'faiss-cpu')}") from error
        self._metric = self._faiss.METRIC_L2 if metric == "l2" else self._faiss.METRIC_INNER_PRODUCT
        self._index = self._faiss.IndexIDMap2(self._make())

    def __len__(self) -> int:
        return len(self._labels)

    def __contains__(self, one: object) -> bool:
        return one in self._labels

    @property
    def version(self) -> int:
        """Number of calls that added or removed vectors since this object was made."""
        return self._version

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
            self._add_rows(labels, rows)
            self._next_label += len(frozen)
            self._version += 1
            self._name(zip(labels.tolist(), frozen, strict=True))

    def remove(self, ids: Sequence[DocumentId]) -> int:
        """Drop the vectors of these ids; returns how many were known."""
        if isinstance(ids, str):
            raise TypeError("ids must be a sequence of ids, not one string")
        with self._lock:
            known = [one for one in dict.fromkeys(ids) if one in self._labels]
            if known:
                self._remove_rows(np.array([self._labels[one] for one in known], np.int64))
                self._version += 1
            for one in known:
                del self._ids[self._labels.pop(one)]
            return len(known)

    def search(self, embedding: ArrayLike, k: int) -> SearchResult:
        """The k nearest documents; RetrievalError if the index is empty or the embedding cannot be used."""
        query, wanted = self._query(embedding), positive("k", k)
        with self._lock:
            return self._nearest(query, wanted)

    def search_stages(self, embedding: ArrayLike, k: int, stages: int = 4) -> Iterator[SearchResult]:
        """Provisional results of a search in at most ``stages`` steps; the last is what ``search`` returns.

        An index that scans goes through its rows part by part, and a graph is searched with growing breadth.
        The lock is free between steps. A change meanwhile ends them by a whole search.
        Errors are those of ``search``.
        """
        query, wanted, steps = self._query(embedding), positive("k", k), positive("stages", stages)
        with self._lock:
            scopes = self._scopes(query, min(wanted + _SPARE, self._size()), steps)
            return self._stages(query, wanted, scopes, self._version)

    def vectors(self, ids: Sequence[DocumentId]) -> Float32:
        """The stored vectors ``[n, dim]`` of these ids; RetrievalError for an id that is not there."""
        with self._lock:
            missing = next((one for one in ids if one not in self._labels), None)
            if missing is not None:
                raise RetrievalError(f"id {missing!r} is not in the index")
            return self._vectors(np.array([self._labels[one] for one in ids], np.int64))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the index to one file; where the disk refuses (OSError), an older one stays as it was."""
        with self._lock:
            manifest = {
                "format": _FORMAT,
                "kind": self.kind,
                "dim": self.dim,
                "metric": self.metric,
                "options": self.options(),
                "next_label": self._next_label,
                "ids": list(self._ids.items()),
            }
            data = memoryview(self._faiss.serialize_index(self._index))
            body = b"\n".join([json.dumps(manifest).encode(), data])
        replace_file(Path(path), b"\n".join([hashlib.sha256(body).hexdigest().encode(), body]))

    def restore(self, data: memoryview, ids: Sequence[tuple[int, DocumentId]], next_label: int) -> None:
        """Take over verified data and its ids by label; called by :func:`load_index`."""
        with self._lock:
            self._index = self._faiss.deserialize_index(np.frombuffer(data, np.uint8))
            self._next_label = next_label
            self._name(ids)

    def options(self) -> dict[str, Any]:
        """Constructor arguments besides dim and metric, as JSON."""
        return {}

    def _name(self, pairs: Any) -> None:
        for label, one in pairs:
            self._labels[one], self._ids[label] = label, one

    def _stages(self, query: Float32, wanted: int, scopes: list[Any], version: int) -> Iterator[SearchResult]:
        found = SearchResult((), ())
        for scope in scopes:
            with self._lock:
                changed = self._version != version
                part = self._nearest(query, wanted, None if changed else scope)
            if self.scans and not changed:
                part = _ordered(found.ids + part.ids, found.scores + part.scores, wanted)
            found = part
            yield found
            if changed:
                return

    def _query(self, embedding: ArrayLike) -> Float32:
        if np.ndim(embedding) != 1:
            shape = list(np.shape(embedding))
            raise RetrievalError(f"expected one embedding [{self.dim}], got shape {shape}")
        return as_rows(np.asarray(embedding)[None], self.dim, self.metric)

    def _size(self) -> int:
        if not self._labels:
            raise RetrievalError("the index is empty; add documents first")
        return len(self._labels)

    def _nearest(self, query: Float32, wanted: int, scope: Any = None) -> SearchResult:
        labels = self._candidates(query, min(wanted + _SPARE, self._size()), scope)
        scores = distances(query[0], self._vectors(labels), self.metric).tolist()
        return _ordered(tuple(self._ids[label] for label in labels.tolist()), tuple(scores), wanted)

    def _scopes(self, query: Float32, count: int, stages: int) -> list[Any]:
        """At most ``stages`` scopes of a search; :attr:`scans` says whether they are parts or steps."""
        bounds = np.unique(np.linspace(0, len(self._labels), stages + 1).astype(int)).tolist()
        return list(pairwise(bounds))

    def _make(self) -> Any:
        return self._faiss.IndexFlat(self.dim, self._metric)

    def _add_rows(self, labels: Labels, rows: Float32) -> None:
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

    def _remove_rows(self, labels: Labels) -> None:
        self._index.remove_ids(labels)


class HnswIndex(VectorIndex):
    """Faiss's HNSW. A search may find fewer than k.

    ``links`` are the neighbours of a node (M), the others the breadth while building and while searching.

    Removed vectors stay as nodes of the graph that no search returns. Once more than 30 % of the nodes are
    such, :meth:`remove` builds the graph anew, which takes as long as adding what is left.
    """

    kind: ClassVar[str] = "faiss-hnsw"
    scans: ClassVar[bool] = False

    def __init__(
        self,
        dim: int,
        metric: str = "cosine",
        *,
        links: int = 32,
        ef_construction: int = 200,
        ef_search: int = 64,
    ) -> None:
        self._links, self._ef_search = positive("links", links), positive("ef_search", ef_search)
        self._ef_construction = positive("ef_construction", ef_construction)
        self._removed: Labels = np.empty(0, np.int64)
        super().__init__(dim, metric)

    def _make(self) -> Any:
        graph = self._faiss.IndexHNSWFlat(self.dim, self._links, self._metric)
        graph.hnsw.efConstruction = self._ef_construction
        return graph

    def _scopes(self, query: Float32, count: int, stages: int) -> list[Any]:
        breadths = {max(count, self._ef_search >> 2 * step) for step in range(min(stages, _BREADTHS))}
        return [*sorted(breadths)[:-1], None]  # all before the full one cost a third of it

    def _candidates(self, query: Float32, count: int, scope: Any = None) -> Labels:
        breadth, nodes = scope or max(self._ef_search, count), self._index.ntotal
        rows = np.searchsorted(self._row_labels(), self._removed)
        kept = self._faiss.IDSelectorNot(self._faiss.IDSelectorBatch(rows)) if len(rows) else None
        while True:
            parameters = self._faiss.SearchParametersHNSW(efSearch=breadth, sel=kept)
            found = self._search_rows(query, count, parameters)
            if len(found) == count or breadth >= nodes:
                return found
            breadth = min(2 * breadth, nodes)

    def _remove_rows(self, labels: Labels) -> None:
        removed = np.union1d(self._removed, labels)
        if len(removed) > _REMOVED_SHARE * self._index.ntotal:
            kept = np.setdiff1d(self._row_labels(), removed)
            index = self._faiss.IndexIDMap2(self._make())
            if len(kept):
                index.add_with_ids(self._vectors(kept), kept)
            self._index, removed = index, removed[:0]
        self._removed = removed

    def restore(self, data: memoryview, ids: Sequence[tuple[int, DocumentId]], next_label: int) -> None:
        super().restore(data, ids, next_label)
        self._removed = np.setdiff1d(self._row_labels(), [label for label, _ in ids])

    def options(self) -> dict[str, Any]:
        names = ("links", "ef_construction", "ef_search")
        return {name: getattr(self, f"_{name}") for name in names}


_KINDS: dict[str, type[VectorIndex]] = {kind.kind: kind for kind in (VectorIndex, HnswIndex)}


def index_names() -> tuple[str, ...]:
    """The names that :func:`open_index` takes."""
    return tuple(sorted(_KINDS))


def open_index(name: str, dim: int, metric: str = "cosine", **options: Any) -> VectorIndex:
    """A new, empty index: one of :func:`index_names`, the width, and ``cosine``, ``l2`` or ``ip``.

    ``options`` are those of the implementation (``links``, ``ef_search`` ...). ValueError or
    TypeError for bad arguments; ImportError names the extra of a missing library.
    """
    if name not in _KINDS:
        raise ValueError(f"unknown index {name!r}; known: {', '.join(index_names())}")
    return _KINDS[name](dim, metric, **options)


def load_index(path: str | os.PathLike[str]) -> VectorIndex:
    """The index that ``save`` wrote to ``path``; RetrievalError if a file is missing or damaged."""
    try:
        raw = read_regular(path)
    except OSError as error:
        raise RetrievalError(f"cannot read the index {path}: {error}") from error
    view, start = memoryview(raw), raw.find(b"\n") + 1
    if hashlib.sha256(view[start:]).hexdigest().encode() != raw[: start - 1]:
        raise RetrievalError(f"{path} is damaged or no index (SHA-256 differs); build the index anew")
    data = raw.find(b"\n", start) + 1
    held = parse_json(raw[start:data])
    if held["format"] != _FORMAT:
        raise RetrievalError(f"{path}: written by another version of the library; build the index anew")
    index = open_index(held["kind"], held["dim"], held["metric"], **held["options"])
    try:
        index.restore(view[data:], held["ids"], held["next_label"])
    except RuntimeError as error:  # what Faiss raises
        raise RetrievalError(f"cannot load the index {path}: {error}") from error
    return index


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


def distances(query: Float32, rows: Float32, metric: str) -> NDArray[np.float64]:
    """Distances ``[n]`` of ``rows`` ``[n, dim]`` to ``query`` ``[dim]``, in float64; unit rows for cosine."""
    wide, keys = query.astype(np.float64), rows.astype(np.float64)
    if metric == "l2":
        gaps = keys - wide
        return np.asarray(np.sqrt(np.einsum("ij,ij->i", gaps, gaps)))
    return np.asarray((0.0 if metric == "ip" else 1.0) - np.einsum("ij,j->i", keys, wide))


def _ordered(ids: tuple[DocumentId, ...], scores: tuple[float, ...], wanted: int) -> SearchResult:
    order = sorted(range(len(ids)), key=lambda i: (scores[i], isinstance(ids[i], str), ids[i]))[:wanted]
    return SearchResult(tuple(ids[i] for i in order), tuple(scores[i] for i in order))
