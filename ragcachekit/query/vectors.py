"""Checking query embeddings, cheaply: this runs inside a lookup of some microseconds."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ragcachekit.errors import RetrievalError
from ragcachekit.query.metrics import Float32, Float64, product

LARGEST_SQUARED_NORM = 1e37  # beyond it sums of two products overflow float32
SMALLEST_SQUARED_NORM = 1e-30  # below it a direction cannot be told in float32


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
    if not squared <= LARGEST_SQUARED_NORM:
        raise RetrievalError(_describe_overflow(vector))
    if needs_direction and squared < SMALLEST_SQUARED_NORM:
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
