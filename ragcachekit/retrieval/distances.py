"""Distances between query embeddings, zero for equal vectors, and the choice of a tolerance.

=========  =================================  ====================================================
metric     distance of query q and key k      unit
=========  =================================  ====================================================
``l2``     ||q - k||                          that of the embedding (Euclidean, *not* squared)
``cosine`` 1 - q.k / (||q|| ||k||)            none, 0 to 2; scaling q or k changes nothing
``ip``     max(q.q, k.k) - q.k                an inner product; equal to ``cosine`` on unit vectors
=========  =================================  ====================================================

``ip`` measures what q.k lacks of the larger self-product. It is 0 only for q = k, and ||q - k||^2 <= 2 d.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ragcachekit.errors import RetrievalError
from ragcachekit.reports import Report

Float32: TypeAlias = NDArray[np.float32]
Float64: TypeAlias = NDArray[np.float64]

METRICS = ("cosine", "ip", "l2")

MAX_SQUARED_NORM = 1e37  # beyond it sums of two products overflow float32
MIN_SQUARED_NORM = 1e-30  # below it a direction cannot be told in float32
_UNIT_ROUNDOFF = 6e-8  # of float32
_MIN_PRODUCT = 1e-36  # float32 products underflow below this
_ZERO = np.zeros((), np.float32)  # an array: added in half the time of a scalar


class Query(NamedTuple):
    """A vector in float32 ``[dim]`` and in float64, and its squared norm."""

    vector: Float32
    wide: Float64
    squared: float

    @property
    def bytes(self) -> bytes:
        """Equal for equal vectors: -0.0 + 0.0 is 0.0."""
        zeroless: Float32 = self.vector + _ZERO
        return zeroless.tobytes()


def check_metric(metric: str) -> str:
    """ValueError with the known names for an unknown metric."""
    if metric not in METRICS:
        raise ValueError(f"unknown metric {metric!r}; known: {', '.join(METRICS)}")
    return metric


def as_query(embedding: ArrayLike, dim: int | None, metric: str) -> Query:
    """An embedding ``[dim]`` (any width where that is None), checked.

    TypeError for what does not hold real numbers; RetrievalError for another shape, NaN, infinity, norms
    above 3e18, or a zero vector under cosine.
    """
    vector = as_floats(embedding)
    if vector.ndim != 1:
        raise RetrievalError(f"expected one embedding of shape [dim], got shape {list(vector.shape)}")
    if not vector.size:
        raise RetrievalError("the embedding is empty")
    if dim is not None and vector.size != dim:
        raise RetrievalError(
            f"the embedding has {vector.size} numbers, expected {dim}: was the embedding model changed?"
        )
    wide = vector.astype(np.float64)  # its squares cannot overflow, and a hit is measured with it
    squared = product(wide, wide)  # is NaN if a number is
    _check_norms(vector, squared, squared, metric)
    return Query(vector, wide, squared)


def as_rows(embeddings: ArrayLike, dim: int, metric: str) -> Float32:
    """Float32 ``[n, dim]``, contiguous; unit rows under cosine. Errors are those of :func:`as_query`."""
    rows = as_floats(embeddings)
    if rows.ndim != 2 or rows.shape[1] != dim:
        raise RetrievalError(f"expected embeddings of shape [n, {dim}], got {list(rows.shape)}")
    wide = rows.astype(np.float64)
    squares = np.einsum("ij,ij->i", wide, wide)
    _check_norms(rows, float(squares.min(initial=np.inf)), float(squares.max(initial=0)), metric)
    if metric != "cosine":
        return rows
    return np.ascontiguousarray(wide / np.sqrt(squares)[:, None], dtype=np.float32)


def _check_norms(rows: Float32, smallest: float, largest: float, metric: str) -> None:
    """RetrievalError for squared norms with which nothing can be measured."""
    if not largest <= MAX_SQUARED_NORM:  # also if it is NaN
        if count := int((~np.isfinite(rows)).sum()):
            raise RetrievalError(f"the embeddings hold {count} NaN or infinite numbers")
        raise RetrievalError("an embedding's norm exceeds 3e18; scale the embeddings down")
    if metric == "cosine" and smallest < MIN_SQUARED_NORM:
        raise RetrievalError("a zero vector has no cosine distance; check the embedding model or use 'l2'")


def distance(metric: str, q: Float64, k: Float64, qq: float, kk: float) -> float:
    """The distance of two vectors in float64, with q.q and k.k given.

    One key at a time: a product of a matrix rounds a row by its place among the others.
    """
    if metric == "l2":
        gap = k - q  # not q.q + k.k - 2 q.k: its rounding exceeds the squared distance of near vectors
        return math.sqrt(product(gap, gap))
    if metric == "cosine":
        return abs(1.0 - product(q, k) / math.sqrt(qq * kk))
    return abs(max(kk, qq) - product(q, k))


def candidates(
    metric: str, products: Float32, squares: Float64, query: Query, largest: float, tolerance: float
) -> list[int]:
    """Rows that may be the nearest within the tolerance, as far as float32 can tell.

    ``products`` are q.k of all rows in float32, ``squares`` k.k, and ``largest`` is at least the greatest of
    those. The error of a product is bounded by (dim + 16) roundoffs of ||q|| ||k||.
    """
    qq, share = query.squared, (query.vector.size + 16) * _UNIT_ROUNDOFF
    error = share * math.sqrt(qq * largest) + 1e-12 * (qq + largest) + _MIN_PRODUCT
    if metric == "l2":
        found, limit, error = squares + qq - 2.0 * products.astype(np.float64), tolerance**2, 2 * error
    elif metric == "cosine":
        found, limit = 1.0 - products / np.sqrt(squares * qq), tolerance
        error = share + 1e-12 + _MIN_PRODUCT / math.sqrt(qq * MIN_SQUARED_NORM)
    else:
        found, limit = np.maximum(squares, qq) - products, tolerance
    nearest = float(found.min())
    if nearest > limit + error:
        return []
    rows: list[int] = (found <= min(nearest + 2 * error, limit + error)).nonzero()[0].tolist()
    return rows


def product(a: Float64, b: Float64) -> float:
    """a.b of two float64 vectors; one routine for all, so that equal vectors give equal products."""
    return float(a.dot(b))


def as_floats(embeddings: ArrayLike) -> Float32:
    """Numbers as float32, contiguous; those too large for it are infinite. TypeError for anything else."""
    try:
        raw: NDArray[np.generic] = np.asarray(embeddings)
    except (TypeError, ValueError) as error:
        raise TypeError(f"an embedding must be a sequence of numbers: {error}") from error
    if raw.dtype.kind not in "fiu":
        raise TypeError(f"an embedding must hold real numbers, not {raw.dtype}")
    with np.errstate(over="ignore"):
        out: Float32 = raw.astype(np.float32, copy=False)
    return out if out.flags.c_contiguous else np.ascontiguousarray(out)


@dataclass(frozen=True)
class Calibration(Report):
    """A tolerance and what it does to the pairs it was chosen on.

    ``hit_rate`` is the share of the ``same_pairs`` rewordings within the tolerance (in the metric's unit),
    ``false_hit_rate`` that of the ``different_pairs`` with different answers.
    """

    metric: str
    tolerance: float
    hit_rate: float
    false_hit_rate: float
    same_pairs: int
    different_pairs: int

    def __str__(self) -> str:
        return (
            f"tolerance {self.tolerance:.4g} ({self.metric}): "
            f"hits {self.hit_rate:.1%} of {self.same_pairs} rewordings, "
            f"{self.false_hit_rate:.1%} of {self.different_pairs} other questions"
        )


def calibrate(
    same: tuple[ArrayLike, ArrayLike],
    different: tuple[ArrayLike, ArrayLike],
    *,
    metric: str = "cosine",
    max_false_hit_rate: float = 0.0,
) -> Calibration:
    """The largest tolerance with a false-hit rate of at most ``max_false_hit_rate`` on these pairs.

    Calibrate on other questions than those you report on. Take as different pairs each question's
    *nearest* one with another answer, not a random one: a cache compares with all its entries.

    Parameters
    ----------
    same, different : pair of array
        Embeddings ``[pairs, dim]`` each: the answers to row i of both are the same, or different.
    metric : {"cosine", "l2", "ip"}
        That of the cache.
    max_false_hit_rate : float
        Between 0 and 1.

    Raises
    ------
    ValueError
        An unknown metric, a rate outside 0..1, or matrices of unequal shape or without rows.
    RetrievalError
        NaN or infinite numbers, or a zero vector under cosine.
    """
    if not 0.0 <= max_false_hit_rate <= 1.0:
        raise ValueError(f"max_false_hit_rate must lie between 0 and 1, got {max_false_hit_rate}")
    near, far = _distances("same", same, metric), _distances("different", different, metric)
    # 0.1 * 30 is 3.0000000000000004, 0.29 * 100 is below 29
    allowed = math.floor(max_false_hit_rate * len(far) + 1e-9)
    if allowed >= len(far):
        tolerance = float(max(near.max(), far.max()))
    else:  # below the first refused by more than the last digits of a product, by which machines may differ
        tolerance = max(0.0, float(np.sort(far)[allowed]) * (1 - 1e-6) - 1e-12)
    return Calibration(
        metric=metric,
        tolerance=tolerance,
        hit_rate=float((near <= tolerance).mean()),
        false_hit_rate=float((far <= tolerance).mean()),
        same_pairs=len(near),
        different_pairs=len(far),
    )


def _distances(name: str, pairs: tuple[ArrayLike, ArrayLike], metric: str) -> Float64:
    left, right = (as_floats(side) for side in pairs)  # as the cache will see them
    if left.shape != right.shape or left.ndim != 2 or not left.size:
        raise ValueError(
            f"{name}: need two equal shapes [pairs, dim] with rows, got {left.shape}, {right.shape}"
        )
    check_metric(metric)
    both = zip(*([as_query(row, None, metric) for row in side] for side in (left, right)), strict=True)
    return np.array([distance(metric, q.wide, k.wide, q.squared, k.squared) for q, k in both])
