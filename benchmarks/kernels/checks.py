"""One figure of ``bench kernels``, and what its result is checked with before the figure counts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 2e-5}
"""Allowed distance of an output vector: rounding weights and outputs to bfloat16 costs about 2e-3."""


@dataclass(frozen=True, eq=False)
class Case:
    """One figure.

    Attributes
    ----------
    kernel, name : str
    work : float
        Operations or bytes of one call, as ``unit`` says.
    unit : {"TFLOP/s", "GB/s"}
    calls : sequence of callable
        One per set of inputs.
    error : callable
        How far the result is from the float64 derivation: of attention and assembly the largest length of
        an output vector's difference over the length of that vector, so that a small output counts like a
        large one; of sums the largest difference over the largest sum. NaN if anything was not written.
    allowed : float
    rows : tuple of int
        Positions of the query rows, for baselines of the same work; empty where there are none.
    """

    kernel: str
    name: str
    work: float
    unit: str
    calls: Sequence[Callable[[], Any]]
    error: Callable[[], float]
    allowed: float
    rows: tuple[int, ...] = ()


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest length of a difference over the length of the expected vector, along the last dimension."""
    expected = expected.double()
    away = (found.double() - expected).norm(dim=-1) / expected.norm(dim=-1)
    return float(away.max()) if bool(torch.isfinite(away).all()) else float("nan")


def largest(distances: Iterable[float], written: Iterable[torch.Tensor]) -> float:
    """The largest of the distances; NaN if one is, or if something in ``written`` is not finite."""
    worst = max(distances, key=lambda away: float("inf") if math.isnan(away) else away)
    return worst if all(bool(torch.isfinite(out).all()) for out in written) else float("nan")


def row_scores(query: torch.Tensor, key: torch.Tensor, row: int, scale: float) -> torch.Tensor:
    """Scores of one row over all keys in float64, ``[kv_heads, heads of each, keys]``."""
    heads = query[:, row].double().view(key.shape[0], -1, query.shape[-1])
    return heads @ key.double().transpose(1, 2) * scale
