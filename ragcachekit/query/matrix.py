"""Query embeddings, checked, and the keys of a cache as one float32 matrix with the exact scan over it."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ragcachekit.errors import RetrievalError
from ragcachekit.query.metrics import Float32, Float64, Metric, product

_LARGEST_SQUARED_NORM = 1e37  # beyond it sums of two products overflow float32
_SMALLEST_SQUARED_NORM = 1e-30  # below it a direction cannot be told in float32
_UNIT_ROUNDOFF = 6e-8  # float32


class KeyMatrix:
    """Rows ``[capacity, dim]``, allocated at once, with what the metric needs. Not thread safe."""

    def __init__(self, capacity: int, dim: int, metric: Metric) -> None:
        self._metric = metric
        self._rows: Float32 = np.empty((capacity, dim), np.float32)
        self._side: Float32 = np.empty(capacity, np.float32)
        self._products: Float64 = np.empty(capacity, np.float64)  # k.k
        self._codes: NDArray[np.int64] = np.empty(capacity, np.int64)
        self._largest = 0.0  # squared norm of any key so far
        self._dot_error = (dim + 16) * _UNIT_ROUNDOFF  # bound of a dot product's error / (|q| |k|)

    def write(self, slot: int, key: bytes, squared: float, code: int) -> None:
        """Put a float32 vector, its squared norm and its partition's code into a row."""
        self._rows[slot] = np.frombuffer(key, np.float32)
        self._products[slot] = squared
        self._side[slot] = self._metric.side(squared)
        self._codes[slot] = code
        self._largest = max(self._largest, squared)

    def move(self, source: int, target: int) -> None:
        """Copy one row over another."""
        for column in (self._rows, self._products, self._side, self._codes):
            column[target] = column[source]

    def nearest(
        self, query: Float32, wide: Float64, squared: float, size: int, code: int | None, tolerance: float
    ) -> tuple[int | None, float]:
        """The nearest of the first ``size`` rows and its distance; ``(None, 0.0)`` beyond the tolerance.

        ``wide`` is the query in float64, ``squared`` its squared norm; with a ``code`` other
        partitions' rows are masked before the nearest is sought.
        """
        metric = self._metric
        ranks = metric.rank(self._rows[:size].dot(query), self._side[:size], squared)
        if code is not None:
            ranks[self._codes[:size] != code] = np.inf
        lowest = float(ranks[ranks.argmin()])
        error = metric.error(self._dot_error, squared, self._largest)
        limit = metric.limit(tolerance, squared) + error
        if lowest > limit:
            return None, 0.0
        near = (ranks <= min(lowest + 2 * error, limit)).nonzero()[0]  # what float32 cannot tell apart
        keys = self._rows.take(near, axis=0).astype(np.float64)
        distances = metric.distance(wide, keys, squared, self._products.take(near))
        best = int(distances.argmin())
        distance = float(distances[best])
        return (int(near[best]), distance) if distance <= tolerance else (None, 0.0)


def as_vector(embedding: ArrayLike, dim: int | None) -> Float32:
    """``embedding`` as float32 ``[dim]`` (any width where that is None); the same object where it is one.

    TypeError for what does not hold real numbers, RetrievalError for another shape.
    """
    if type(embedding) is np.ndarray and embedding.dtype == np.float32:
        vector: Float32 = embedding
    else:
        vector = _convert(embedding)
    if vector.shape != (dim,):
        _check_shape(vector, dim)
    return vector if vector.flags.c_contiguous else np.ascontiguousarray(vector)


def widened(vector: Float32, needs_direction: bool) -> tuple[Float64, float]:
    """The vector in float64 and ||vector||^2, which is also the NaN check: no second pass over the numbers.

    RetrievalError for NaN, infinity, norms above 3e18, or where there must be a direction and is none.
    """
    wide = vector.astype(np.float64)  # its squares cannot overflow, and a hit is measured with it
    squared = product(wide, wide)
    if not squared <= _LARGEST_SQUARED_NORM:
        raise RetrievalError(_describe_overflow(vector))
    if needs_direction and squared < _SMALLEST_SQUARED_NORM:
        raise RetrievalError("the zero vector has no cosine distance; check the embedding model or use 'l2'")
    return wide, squared


def exact_bytes(vector: Float32) -> bytes:
    """Bytes that are equal for equal vectors: -0.0 + 0.0 is 0.0."""
    zeroless: Float32 = vector + np.float32(0)
    return zeroless.tobytes()


def _convert(embedding: ArrayLike) -> Float32:
    try:
        raw: NDArray[np.generic] = np.asarray(embedding)
    except (TypeError, ValueError) as error:
        raise TypeError(f"an embedding must be a sequence of numbers: {error}") from error
    if raw.dtype.kind not in "fiu":
        raise TypeError(f"an embedding must hold real numbers, not {raw.dtype}")
    with np.errstate(over="ignore"):  # too large for float32: infinite, refused with the norm
        return raw.astype(np.float32)


def _check_shape(vector: Float32, dim: int | None) -> None:
    if vector.ndim != 1:
        raise RetrievalError(f"expected one embedding of shape [dim], got shape {list(vector.shape)}")
    if not vector.size:
        raise RetrievalError("the embedding is empty")
    if dim is not None:
        raise RetrievalError(
            f"the embedding has {vector.size} numbers, expected {dim}: was the embedding model changed?"
        )


def _describe_overflow(vector: Float32) -> str:
    if math.isfinite(float(np.abs(vector).max())):
        return "the embedding's norm exceeds 3e18; scale the embeddings down"
    return f"the embedding holds {int((~np.isfinite(vector)).sum())} NaN or infinite numbers"
