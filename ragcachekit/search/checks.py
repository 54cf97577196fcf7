"""Checks of what goes into an index, and of the optional libraries."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ragcachekit.config import positive
from ragcachekit.errors import RetrievalError, missing_extra

Float32: TypeAlias = NDArray[np.float32]
DocumentId: TypeAlias = str | int

METRICS = ("cosine", "ip", "l2")

_LARGEST_NORM = 3e18  # beyond it float32 products overflow
_SMALLEST_NORM = 1e-15  # below it a direction cannot be told in float32


def load_library(module: str, extra: str, package: str) -> Any:
    """The module, or ImportError with the package and the extra that install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"this index needs {module}: {missing_extra(extra, package)}") from error


def check_metric(metric: str) -> str:
    """ValueError with the known names for an unknown metric."""
    if metric not in METRICS:
        raise ValueError(f"unknown metric {metric!r}; known: {', '.join(METRICS)}")
    return metric


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
    if rows.size and largest.max() > _LARGEST_NORM:
        raise RetrievalError("the embeddings' numbers exceed 3e18; scale them down")
    norms = np.sqrt(np.einsum("ij,ij->i", rows, rows))
    if rows.size and norms.max() > _LARGEST_NORM:
        raise RetrievalError("the embeddings' norms exceed 3e18; scale them down")
    if metric != "cosine":
        return rows
    if rows.size and norms.min() < _SMALLEST_NORM:
        raise RetrievalError("a zero vector has no cosine distance; check the embedding model or use 'l2'")
    units: NDArray[np.float64] = rows / norms[:, None]
    return units
