"""Bootstrap intervals of bench figures."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

RESAMPLES = 2000

Statistic = Callable[[NDArray[np.float64]], NDArray[np.float64]]
"""Sums per column ``[resamples, columns]`` -> the figure ``[resamples]``; NaN where it has none."""


class Bootstrap:
    """Draws of ``n`` units with replacement, the same for every figure, so that figures are paired.

    Raises ValueError if there is nothing to draw from.
    """

    def __init__(self, n: int, seed: int = 0) -> None:
        if n < 1:
            raise ValueError(f"an interval needs at least one unit to draw from, got {n}")
        picks = np.random.default_rng(seed).integers(0, n, (RESAMPLES, n))
        # How often each unit was drawn: one matrix product then resamples any figure.
        self._counts = np.stack([np.bincount(pick, minlength=n) for pick in picks]).astype(np.float64)

    def interval(self, columns: ArrayLike, statistic: Statistic) -> tuple[float, float] | None:
        """95 % percentile interval of ``statistic`` of the sums over ``columns`` ``[n, columns]``.

        None if the figure has no value in most of the resamples.
        """
        figures = statistic(self._counts @ np.asarray(columns, np.float64))
        figures = figures[~np.isnan(figures)]
        if figures.size <= RESAMPLES // 2:
            return None
        low, high = np.quantile(figures, (0.025, 0.975))
        return float(low), float(high)

    def upper_of_mean(self, values: ArrayLike, level: float) -> float:
        """One-sided upper bound of the mean of ``values`` ``[n]``: the percentile ``level`` (0 to 1)."""
        column = np.asarray(values, np.float64)
        return float(np.quantile(self._counts @ column / len(column), level))

    def of_mean(self, values: ArrayLike) -> tuple[float, float]:
        """95 % percentile interval of the mean of ``values`` ``[n]``."""
        column = np.asarray(values, np.float64)
        found = self.interval(column[:, None], lambda sums: sums[:, 0] / len(column))
        if found is None:
            raise ValueError("the values hold NaN")
        return found
