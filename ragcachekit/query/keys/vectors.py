"""Query embeddings, checked and converted."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ragcachekit.errors import RetrievalError
from ragcachekit.query.metrics import Float32, Float64, product

_LARGEST_SQUARED_NORM = 1e37  # beyond it sums of two products overflow float32
_SMALLEST_SQUARED_NORM = 1e-30  # below it a direction cannot be told in float32
_ZERO = np.zeros((), np.float32)  # an array: added in half the time of a scalar


class Query(NamedTuple):
    """A vector in float32 ``[dim]`` and in float64, and its squared norm."""

    vector: Float32
    wide: Float64
    squared: float


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


def checked(vector: Float32, needs_direction: bool) -> Query:
    """The vector as a query; ||vector||^2 is also the NaN check: no second pass over the numbers.

    RetrievalError for NaN, infinity, norms above 3e18, or where there must be a direction and is none.
    """
    wide = vector.astype(np.float64)  # its squares cannot overflow, and a hit is measured with it
    squared = product(wide, wide)
    if not squared <= _LARGEST_SQUARED_NORM:
        raise RetrievalError(_describe_overflow(vector))
    if needs_direction and squared < _SMALLEST_SQUARED_NORM:
        raise RetrievalError("the zero vector has no cosine distance; check the embedding model or use 'l2'")
    return Query(vector, wide, squared)


def checked_rows(
    embeddings: ArrayLike, dim: int | None, needs_direction: bool
) -> tuple[Float32, list[Query]]:
    """Float32 ``[n, dim]``, contiguous, and its rows as queries.

    TypeError and RetrievalError as for one embedding, with the number of the row.
    """
    is_ready = isinstance(embeddings, np.ndarray) and embeddings.dtype == np.float32
    rows: Float32 = np.ascontiguousarray(embeddings if is_ready else _convert(embeddings), np.float32)
    if rows.ndim != 2:
        raise RetrievalError(f"expected embeddings of shape [n, dim], got shape {list(rows.shape)}")
    if len(rows) and rows.shape[1] != dim:
        _check_shape(rows[0], dim)
    queries = []
    for number, row in enumerate(rows):
        try:
            queries.append(checked(row, needs_direction))
        except RetrievalError as error:
            raise RetrievalError(f"row {number}: {error}") from error
    return rows, queries


def exact_bytes(vector: Float32) -> bytes:
    """Bytes that are equal for equal vectors: -0.0 + 0.0 is 0.0."""
    zeroless: Float32 = vector + _ZERO
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
