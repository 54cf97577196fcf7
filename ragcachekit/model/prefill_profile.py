"""Prefill profile: seconds of a prefill over (cached, new) tokens (RAGCache section 5.1, Algorithm 1)."""

from __future__ import annotations

import itertools
import json
import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ragcachekit.files import parse_json

SCHEMA = 1
CACHED_GRID = (0, 256, 1024, 4096, 8192, 16384, 32768)
NEW_GRID = (1, 16, 64, 256, 1024, 2048, 4096, 8192, 16384)
MOST_DRIFT = 16.0
"""Largest factor by which observations scale the table, up or down."""

_SMOOTHING = 0.1


class PrefillProfile:
    """Seconds of a prefill of ``new`` tokens behind ``cached`` ones.

    Bilinear between the grid points; linear beyond them, with the slope of the outermost cells. Never
    negative, and never less for more tokens: noisy points are raised to their greater neighbour. The table
    never changes; :meth:`observed` scales all of it, so that load or another clock is followed.

    One thread may observe while others read; of two simultaneous observations one may be lost.

    Parameters
    ----------
    cached, new : sequence of int
        The grid, ascending: cached from 0 or more, new from 1 or more.
    seconds : array ``[len(cached), len(new)]``
        Positive numbers; ValueError for any other table or grid.
    scale : float
        Factor of the whole table.
    """

    __slots__ = ("_beyond_cached", "_beyond_new", "_cached", "_given", "_new", "_rows", "_scale")

    def __init__(
        self, cached: Sequence[int], new: Sequence[int], seconds: ArrayLike, *, scale: float = 1.0
    ) -> None:
        table = _checked(cached, new, seconds)
        if not 0 < scale < math.inf:
            raise ValueError(f"the scale of a profile must be a number > 0, got {scale}")
        self._given = (tuple(map(int, cached)), tuple(map(int, new)), table.tolist())
        self._scale = float(scale)
        table, self._cached = _from_zero(table, cached, axis=0)
        table, self._new = _from_zero(table, new, axis=1)
        table = np.maximum.accumulate(np.maximum.accumulate(table, axis=0), axis=1)
        self._rows: list[list[float]] = table.tolist()
        self._beyond_cached = _last_slopes(table, self._cached)
        self._beyond_new = _last_slopes(table.T, self._new)

    @classmethod
    def measured(cls, points: Iterable[tuple[int, int, float]]) -> PrefillProfile:
        """Profile of measured points ``(cached, new, seconds)``; the median of repeated ones.

        Raises ValueError if the points do not fill a grid.
        """
        found: dict[tuple[int, int], list[float]] = {}
        for cached, new, seconds in points:
            found.setdefault((cached, new), []).append(seconds)
        rows, columns = sorted({c for c, _ in found}), sorted({n for _, n in found})
        lacking = [(c, n) for c in rows for n in columns if (c, n) not in found]
        if not found or lacking:
            raise ValueError(f"measure every cached with every new token count; lacking: {lacking or 'all'}")
        return cls(rows, columns, [[float(np.median(found[c, n])) for n in columns] for c in rows])

    @classmethod
    def of_shape(
        cls,
        *,
        layers: int,
        hidden: int,
        inter: int,
        heads: int,
        kv_heads: int,
        flops_per_second: float,
        bytes_per_second: float,
        bytes_per_weight: float = 2,
        overhead: float = 0.0,
        cached: Sequence[int] = CACHED_GRID,
        new: Sequence[int] = NEW_GRID,
    ) -> PrefillProfile:
        """Profile by arithmetic, for simulations: weights are read once, every row attends to all before it.

        ``overhead + max(weights / bytes_per_second, flops / flops_per_second)``. A token costs two operations
        per weight and, per layer, four per head dimension and key. Embedding and output head are left out.
        The model is a decoder with gated MLP; rates are attained ones, not peaks; ``overhead`` is in seconds
        per forward.
        """
        kv_width = hidden * kv_heads // heads
        weights = layers * (2 * hidden * hidden + 2 * hidden * kv_width + 3 * hidden * inter)
        loading = weights * bytes_per_weight / bytes_per_second

        def seconds(behind: int, count: int) -> float:
            flops = 2.0 * weights * count + 4.0 * layers * hidden * count * (behind + count / 2)
            return overhead + max(loading, flops / flops_per_second)

        return cls(cached, new, [[seconds(c, n) for n in new] for c in cached])

    @property
    def scale(self) -> float:
        """Factor of the table after all observations."""
        return self._scale

    def seconds(self, cached: float, new: float) -> float:
        """Estimated seconds of one prefill; 0 for no new tokens, ValueError for negative counts."""
        if cached < 0 or new < 0:
            raise ValueError(f"token counts must be >= 0, got {cached} cached and {new} new")
        return self._scale * self._table(cached, new) if new else 0.0

    def observed(self, cached: float, new: float, seconds: float) -> None:
        """Scale the whole table slowly towards an observed time, by at most :data:`MOST_DRIFT`.

        Raises ValueError if no token was new or the time is not a positive number.
        """
        if new <= 0 or cached < 0 or not 0 < seconds < math.inf:
            raise ValueError(f"no prefill takes {seconds} s for {new} new tokens behind {cached}")
        expected = self._table(cached, new)
        if expected <= 0:
            return  # extrapolated from noisy points: no ratio
        ratio = min(max(seconds / expected, 1 / MOST_DRIFT), MOST_DRIFT)
        self._scale = math.exp((1 - _SMOOTHING) * math.log(self._scale) + _SMOOTHING * math.log(ratio))

    def to_json(self) -> str:
        """Grid, table as given, and scale, as JSON."""
        cached, new, seconds = self._given
        return json.dumps(
            {"schema": SCHEMA, "cached": cached, "new": new, "seconds": seconds, "scale": self._scale}
        )

    @classmethod
    def from_json(cls, text: str | bytes) -> PrefillProfile:
        """Profile from the text of :meth:`to_json`; ValueError for any other text."""
        found: Any = parse_json(text)
        if not isinstance(found, dict) or found.get("schema") != SCHEMA:
            raise ValueError(f"this is no prefill profile of schema {SCHEMA}; measure it again")
        try:
            return cls(found["cached"], found["new"], found["seconds"], scale=found["scale"])
        except (KeyError, TypeError, OverflowError) as error:
            raise ValueError(f"a damaged prefill profile ({error!r}); measure it again") from error

    def _table(self, cached: float, new: float) -> float:
        last_cached, last_new = self._cached[-1], self._new[-1]
        x, y = min(cached, last_cached), min(new, last_new)
        i, u = _cell(self._cached, x)
        j, v = _cell(self._new, y)
        upper, lower = self._rows[i], self._rows[min(i + 1, len(self._rows) - 1)]
        value = (1 - u) * _between(upper, j, v) + u * _between(lower, j, v)
        if cached > x:
            value += (cached - x) * _between(self._beyond_cached, j, v)
        if new > y:
            value += (new - y) * _between(self._beyond_new, i, u)
        return value


def _checked(cached: Sequence[int], new: Sequence[int], seconds: ArrayLike) -> np.ndarray[Any, Any]:
    for name, grid, first in (("cached", cached, 0), ("new", new, 1)):
        ascending = len(grid) > 0 and all(a < b for a, b in itertools.pairwise(grid))
        if not ascending or grid[0] < first:
            raise ValueError(f"{name} token counts must ascend from {first} or more, got {list(grid)}")
    table = np.asarray(seconds, np.float64)
    if table.shape != (len(cached), len(new)):
        raise ValueError(
            f"seconds must have one row per cached and one column per new count, got {table.shape}"
        )
    if not (np.isfinite(table).all() and (table > 0).all()):
        raise ValueError("every time in a profile must be a positive number of seconds")
    return table


def _from_zero(
    table: np.ndarray[Any, Any], grid: Sequence[int], axis: int
) -> tuple[np.ndarray[Any, Any], list[int]]:
    """Table extended to zero tokens by the line through its first two points."""
    if grid[0] == 0:
        return table, list(grid)
    first = np.take(table, [0], axis)
    if len(grid) > 1:
        slope = (np.take(table, [1], axis) - first) / (grid[1] - grid[0])
        first = np.clip(first - slope * grid[0], 0, first)
    return np.concatenate([first, table], axis), [0, *grid]


def _last_slopes(table: np.ndarray[Any, Any], grid: list[int]) -> list[float]:
    """Slopes beyond the last row, made to ascend: otherwise the sum could shrink along the other axis."""
    if len(grid) == 1:
        return [0.0] * table.shape[1]
    slopes = (table[-1] - table[-2]) / (grid[-1] - grid[-2])
    out: list[float] = np.maximum.accumulate(slopes).tolist()
    return out


def _cell(grid: list[int], at: float) -> tuple[int, float]:
    """Cell of a grid that contains ``at``, and the share of the way into it, 0 to 1."""
    if len(grid) == 1:
        return 0, 0.0
    cell = min(bisect_right(grid, at) - 1, len(grid) - 2)
    return cell, (at - grid[cell]) / (grid[cell + 1] - grid[cell])


def _between(values: list[float], at: int, share: float) -> float:
    return (1 - share) * values[at] + share * values[min(at + 1, len(values) - 1)]
