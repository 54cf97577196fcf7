"""Prefill profile: seconds of a prefill over (cached, new) tokens (RAGCache section 5.1, Algorithm 1)."""

from __future__ import annotations

import itertools
import json
import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ragcachekit.files import parse_json

SCHEMA = 1
CACHED_GRID = (0, 256, 1024, 4096, 8192, 16384, 32768)
NEW_GRID = (1, 16, 64, 256, 1024, 2048, 4096, 8192, 16384)
MOST_DRIFT = 16.0  # largest factor by which observations scale the table, up or down

FAR = 1 << 24  # tokens up to which tables are extended

_SMOOTHING = 0.1
_Table = NDArray[np.float64]


class PrefillProfile:
    """Seconds of a prefill of ``new`` tokens behind ``cached`` ones.

    Bilinear between the grid points, linear beyond them, and never less for more tokens: noisy points are
    raised to their greater neighbour. :meth:`observed` scales the whole table.

    Parameters
    ----------
    cached, new : sequence of int
        The grid, ascending: cached from 0 or more, new from 1 or more.
    seconds : array ``[len(cached), len(new)]``
        Positive numbers; ValueError for any other table or grid.
    scale : float
        Factor of the whole table.
    """

    def __init__(
        self, cached: Sequence[int], new: Sequence[int], seconds: ArrayLike, *, scale: float = 1.0
    ) -> None:
        table = _checked(cached, new, seconds)
        if not 0 < scale < math.inf:
            raise ValueError(f"the scale of a profile must be a number > 0, got {scale}")
        self._given = (tuple(map(int, cached)), tuple(map(int, new)), table.tolist())
        self.scale = float(scale)
        table, cached = _from_zero(table, cached)
        columns, new = _from_zero(table.T, new)
        table = np.maximum.accumulate(np.maximum.accumulate(columns.T, axis=0), axis=1)
        table, self._cached = _to_far(table, cached)
        columns, self._new = _to_far(table.T, new)
        self._rows: list[list[float]] = columns.T.tolist()

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
    ) -> PrefillProfile:
        """Profile by arithmetic: weights are read once, every row attends to all before it.

        ``max(weights / bytes_per_second, flops / flops_per_second)``. A token costs two operations per weight
        and, per layer, four per head dimension and key. The model is a decoder with gated MLP, without
        embedding and head; rates are attained ones.
        """
        kv_width = hidden * kv_heads // heads
        weights = layers * (2 * hidden * hidden + 2 * hidden * kv_width + 3 * hidden * inter)
        loading = weights * bytes_per_weight / bytes_per_second

        def seconds(behind: int, count: int) -> float:
            flops = 2.0 * weights * count + 4.0 * layers * hidden * count * (behind + count / 2)
            return max(loading, flops / flops_per_second)

        return cls(CACHED_GRID, NEW_GRID, [[seconds(c, n) for n in NEW_GRID] for c in CACHED_GRID])

    def seconds(self, cached: float, new: float) -> float:
        """Estimated seconds of one prefill; 0 for no new tokens, ValueError for negative counts."""
        if cached < 0 or new < 0:
            raise ValueError(f"token counts must be >= 0, got {cached} cached and {new} new")
        return self.scale * self._table(cached, new) if new else 0.0

    def observed(self, cached: float, new: float, seconds: float) -> None:
        """Scale the whole table slowly towards an observed time, by at most :data:`MOST_DRIFT`.

        ValueError if no token was new or the time is not a positive number.
        """
        if new <= 0 or cached < 0 or not 0 < seconds < math.inf:
            raise ValueError(f"no prefill takes {seconds} s for {new} new tokens behind {cached}")
        expected = self._table(cached, new)
        if expected <= 0:
            return  # extrapolated from noisy points
        ratio = min(max(seconds / expected, 1 / MOST_DRIFT), MOST_DRIFT)
        self.scale = math.exp((1 - _SMOOTHING) * math.log(self.scale) + _SMOOTHING * math.log(ratio))

    def to_json(self) -> str:
        """Grid, table as given, and scale, as JSON."""
        cached, new, seconds = self._given
        return json.dumps(
            {"schema": SCHEMA, "cached": cached, "new": new, "seconds": seconds, "scale": self.scale}
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
        i, u = _cell(self._cached, cached)
        j, v = _cell(self._new, new)
        fewer, more = ((1 - v) * row[j] + v * row[j + 1] for row in self._rows[i : i + 2])
        return (1 - u) * fewer + u * more


def _checked(cached: Sequence[int], new: Sequence[int], seconds: ArrayLike) -> _Table:
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


def _from_zero(table: _Table, grid: Sequence[int]) -> tuple[_Table, Sequence[int]]:
    """Rows extended to zero tokens by the line through the first two."""
    if grid[0] == 0:
        return table, grid
    first = table[:1]
    if len(grid) > 1:
        slope = (table[1:2] - first) / (grid[1] - grid[0])
        first = np.clip(first - slope * grid[0], 0, first)
    return np.concatenate([first, table]), [0, *grid]


def _to_far(table: _Table, grid: Sequence[int]) -> tuple[_Table, list[int]]:
    """Rows extended to :data:`FAR` by the last slopes, made to ascend as the rows do."""
    far = max(FAR, 2 * grid[-1])
    slopes = np.zeros_like(table[-1])
    if len(grid) > 1:
        slopes = np.maximum.accumulate((table[-1] - table[-2]) / (grid[-1] - grid[-2]))
    return np.concatenate([table, [table[-1] + slopes * (far - grid[-1])]]), [*grid, far]


def _cell(grid: list[int], at: float) -> tuple[int, float]:
    """Cell of a grid that contains ``at``, and the share of the cell before it."""
    cell = min(bisect_right(grid, at) - 1, len(grid) - 2)
    return cell, (at - grid[cell]) / (grid[cell + 1] - grid[cell])
