"""Distances between two query embeddings: one metric, one unit, zero for equal vectors.

=========  =================================  ====================================================
metric     distance of query q and key k      unit
=========  =================================  ====================================================
``l2``     ||q - k||                          that of the embedding (Euclidean, *not* squared)
``cosine`` 1 - q.k / (||q|| ||k||)            none, 0 to 2; scaling q or k changes nothing
``ip``     max(q.q, k.k) - q.k                an inner product; equal to ``cosine`` on unit vectors
=========  =================================  ====================================================

``ip`` measures what q.k lacks of the larger self-product. It is 0 only for q = k, and ||q - k||^2 <= 2 d.

Each metric ranks all keys in float32 from one matrix-vector product and measures a few in float64. A bound
of the first's error decides which keys need the second.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Float32: TypeAlias = NDArray[np.float32]
Float64: TypeAlias = NDArray[np.float64]

UNIT_ROUNDOFF = 6e-8
"""Of float32."""
_EPSILON = 1.2e-7  # float32; four of them cover the additions and the rounding of the norms
_TINY = 1e-36  # float32 products underflow below this


class L2:
    """Rank: ||k||^2 / 2 - q.k."""

    name = "l2"
    needs_direction = False

    def side(self, squared_norm: float) -> float:
        """The number stored beside each key, from its squared norm."""
        return squared_norm / 2

    def rank(self, dots: Float32, side: Float32, squared_norm: float) -> Float32:
        """Ranks, rising with the distance; from the products q.k, in place where possible."""
        return np.subtract(side, dots, out=dots)

    def limit(self, distance: float, squared_norm: float) -> float:
        """The rank that a key at ``distance`` from the query would have."""
        return (distance * distance - squared_norm) / 2

    def bounded_limit(self, distance: float, squared_norm: float) -> float:
        """The limit of ``offset`` - q.k, for a key scaled by ``scale``."""
        return self.limit(distance, squared_norm)

    def scale(self, squared_norms: Float64) -> Float64:
        """Factors ``[n]`` of the keys whose products with a query are bounded."""
        return np.ones_like(squared_norms)

    def offset(self, squared_norms: Float64) -> Float64:
        """What is added ``[n]`` to minus the product of a scaled key and a query."""
        return squared_norms / 2

    def error(self, dot_error: float, squared_norm: float, largest: float) -> float:
        """Bound of the rank's rounding error; ``largest`` is the greatest squared norm of a key.

        The squared norms may themselves be off by ``dot_error``, relative to their size.
        """
        scale = squared_norm + largest
        return dot_error * math.sqrt(squared_norm * largest) + (dot_error + 4 * _EPSILON) * scale + _TINY

    def distance(self, query: Float64, key: Float64, qq: float, kk: float) -> float:
        """The distance in float64, with q.q and k.k given.

        One key at a time: a product of a matrix rounds a row by its place among the others.
        """
        # Not q.q + k.k - 2 q.k: its rounding is larger than the squared distance of near vectors.
        gap = key - query
        return math.sqrt(product(gap, gap))


class InnerProduct(L2):
    """Rank: max(q.q, k.k) - q.k, the distance itself."""

    name = "ip"

    def side(self, squared_norm: float) -> float:
        return squared_norm

    def rank(self, dots: Float32, side: Float32, squared_norm: float) -> Float32:
        larger = np.maximum(side, squared_norm)
        return np.subtract(larger, dots, out=dots)

    def limit(self, distance: float, squared_norm: float) -> float:
        return distance

    def bounded_limit(self, distance: float, squared_norm: float) -> float:
        return distance - squared_norm / 2  # the mean of q.q and k.k is at most the larger

    def distance(self, query: Float64, key: Float64, qq: float, kk: float) -> float:
        return abs(max(kk, qq) - product(query, key))


class Cosine(L2):
    """Rank: -q.k / ||k||."""

    name = "cosine"
    needs_direction = True

    def side(self, squared_norm: float) -> float:
        return -1.0 / math.sqrt(squared_norm)

    def rank(self, dots: Float32, side: Float32, squared_norm: float) -> Float32:
        return np.multiply(dots, side, out=dots)

    def limit(self, distance: float, squared_norm: float) -> float:
        return (distance - 1.0) * math.sqrt(squared_norm)

    def error(self, dot_error: float, squared_norm: float, largest: float) -> float:
        return (2 * dot_error + 4 * _EPSILON) * math.sqrt(squared_norm) + _TINY

    def scale(self, squared_norms: Float64) -> Float64:
        return 1.0 / np.sqrt(squared_norms)

    def offset(self, squared_norms: Float64) -> Float64:
        return np.zeros_like(squared_norms)

    def distance(self, query: Float64, key: Float64, qq: float, kk: float) -> float:
        return abs(1.0 - product(query, key) / math.sqrt(qq * kk))


Metric: TypeAlias = L2
"""Fast ranking and exact measurement of one distance."""

_METRICS: dict[str, Metric] = {metric.name: metric for metric in (L2(), Cosine(), InnerProduct())}


def get_metric(name: str) -> Metric:
    """The metric called ``name``; ValueError with the known names otherwise."""
    if name not in _METRICS:
        raise ValueError(f"unknown metric {name!r}; known: {', '.join(sorted(_METRICS))}")
    return _METRICS[name]


def product(a: Float64, b: Float64) -> float:
    """a.b of two float64 vectors; one routine for all, so that equal vectors give equal products."""
    return float(a.dot(b))


def paired_distances(metric: Metric, queries: Float64, keys: Float64) -> Float64:
    """Distances ``[n]`` between the rows of two float64 matrices ``[n, dim]``."""
    pairs = zip(queries, keys, strict=True)
    return np.array([metric.distance(q, k, product(q, q), product(k, k)) for q, k in pairs])
