"""Choosing the tolerance: the largest one that does not confuse too many different questions."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ragcachekit.errors import RetrievalError
from ragcachekit.reports import Report
from ragcachekit.retrieval.distances import Float64, check_metric, distance, product


@dataclass(frozen=True)
class Calibration(Report):
    """A tolerance and what it does to the pairs it was chosen on.

    ``tolerance`` is in the unit of the metric. ``hit_rate`` is the share of the ``same_pairs`` rewordings
    within it, ``false_hit_rate`` that of the ``different_pairs`` with different answers.
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
    tolerance = _largest(near, far, max_false_hit_rate)
    return Calibration(
        metric=metric,
        tolerance=tolerance,
        hit_rate=float((near <= tolerance).mean()),
        false_hit_rate=float((far <= tolerance).mean()),
        same_pairs=len(near),
        different_pairs=len(far),
    )


def _largest(near: Float64, far: Float64, rate: float) -> float:
    allowed = math.floor(rate * len(far) + 1e-9)  # 0.1 * 30 is 3.0000000000000004, 0.29 * 100 is below 29
    if allowed >= len(far):
        return float(max(near.max(), far.max()))
    first_refused = float(np.sort(far)[allowed])
    # Backed off by more than the last digits of a float64 product, by which two machines may differ.
    return max(0.0, first_refused * (1 - 1e-6) - 1e-12)


def _distances(name: str, pairs: tuple[ArrayLike, ArrayLike], metric: str) -> Float64:
    left, right = (_matrix(name, side) for side in pairs)
    if left.shape != right.shape or not left.size:
        raise ValueError(
            f"{name}: need two equal shapes [pairs, dim] with rows, got {left.shape}, {right.shape}"
        )
    if check_metric(metric) == "cosine" and not (left.any(axis=1).all() and right.any(axis=1).all()):
        raise RetrievalError(f"{name}: a zero vector has no cosine distance")
    rows = zip(left, right, strict=True)
    return np.array([distance(metric, q, k, product(q, q), product(k, k)) for q, k in rows])


def _matrix(name: str, side: ArrayLike) -> Float64:
    raw: NDArray[np.float32] = np.asarray(side, np.float32)  # as the cache will see them
    if raw.ndim != 2:
        raise ValueError(f"{name}: embeddings must have the shape [pairs, dim], got {list(raw.shape)}")
    if not np.isfinite(raw).all():
        raise RetrievalError(f"{name}: the embeddings hold NaN or infinite numbers")
    return raw.astype(np.float64)
