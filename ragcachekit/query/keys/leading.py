"""Bounds of many distances from the leading columns of the keys, so that few keys are read in full."""

from __future__ import annotations

import math

import numpy as np

from ragcachekit.query.metrics import UNIT_ROUNDOFF, Float32, Float64, Metric

LEADING_COLUMNS = 94
"""And two of bookkeeping: 96."""

_ROWS_AT_A_TIME = 4096
_STRIKES = 4
_LONGEST_PAUSE = 4096  # lookups


class LeadingColumns:
    """Leading columns of the keys ``[room, columns]`` and the norm of each key's rest. Not thread safe.

    With q and k split behind the leading columns, q.k <= q1.k1 + ||q2|| ||k2|| (Cauchy-Schwarz). One
    product with a matrix of few columns thus bounds all distances from below. It never excludes a key
    that lies within the tolerance: rounding is bounded too.
    """

    def __init__(self, room: int, dim: int, metric: Metric, columns: int = LEADING_COLUMNS) -> None:
        self.columns = columns
        self._metric = metric
        self._dim = dim
        self._dot_error = (dim + 16) * UNIT_ROUNDOFF
        self._upwards = 1 + self._dot_error
        self._keys: Float32 = np.empty((room, columns + 2), np.float32)  # k1, ||k2||, -offset
        self._query: Float32 = np.ones(columns + 2, np.float32)  # q1, ||q2||, 1
        self._head: Float32 = self._query[:columns]
        self._strikes = self._pause = 0
        self._longest_pause = 32
        self._failed_at = math.inf

    @staticmethod
    def applicable(dim: int) -> bool:
        """Whether keys of this width have enough columns for this to be faster."""
        return dim >= 2 * (LEADING_COLUMNS + 2)

    def wider(self) -> LeadingColumns | None:
        """Empty, with twice the columns; None if that would not be faster."""
        columns = 2 * self.columns + 2
        if columns + 2 > self._dim / 2:
            return None
        return LeadingColumns(len(self._keys), self._dim, self._metric, columns)

    def write(self, slot: int, rows: Float32, squares: Float64) -> None:
        """Put the keys ``rows`` (float32 ``[n, dim]``) with their squared norms at ``slot`` and after."""
        for start in range(0, len(rows), _ROWS_AT_A_TIME):
            some = slice(start, start + _ROWS_AT_A_TIME)
            self._keys[slot + start : slot + start + len(rows[some])] = self.parts(rows[some], squares[some])

    def parts(self, rows: Float32, squares: Float64) -> Float32:
        """Leading columns, norm of the rest (rounded up) and minus the offset: ``[n, columns + 2]``."""
        out = np.empty((len(rows), self.columns + 2), np.float32)
        scaled = rows * self._metric.scale(squares)[:, None]
        rest = scaled[:, self.columns :]
        out[:, :-2] = scaled[:, : self.columns]
        out[:, -2] = np.sqrt(np.einsum("ij,ij->i", rest, rest)) * (1 + 4 * UNIT_ROUNDOFF)
        out[:, -1] = -self._metric.offset(squares)
        return out

    def move(self, source: int, target: int) -> None:
        """Copy one row over another."""
        self._keys[target] = self._keys[source]

    def bounds(self, query: Float32, size: int) -> Float32:
        """Upper bounds ``[size]`` of q.k - offset."""
        bounds: Float32 = self._keys[:size].dot(self._split(query))
        return bounds

    def bounds_of_many(self, queries: Float32, size: int) -> Float32:
        """Upper bounds ``[n, size]`` for the rows of ``queries``."""
        split = np.stack([self._split(query).copy() for query in queries])
        bounds: Float32 = split.dot(self._keys[:size].T)
        return bounds

    def error(self, squared: float, largest: float) -> float:
        """How far rounding may lift a distance; ``squared`` norms of the query and of the longest key."""
        return self._metric.error(self._dot_error, squared, largest)

    def least(self, distance: float, squared: float, error: float) -> float:
        """The lowest bound that a key within ``distance`` of the query can have."""
        return max(-self._metric.bounded_limit(distance, squared) - error, -3e38)  # which float32 can hold

    def remaining(self, bounds: Float32, least: float) -> list[int]:
        """Slots of the keys that their bounds do not exclude; too many, too often, exhaust these columns."""
        slots: list[int] = (bounds >= least).nonzero()[0].tolist()
        is_slow = (
            len(slots) * self._dim > len(bounds) * self.columns
        )  # to read them, compared with the bounds
        self._strikes = max(0, self._strikes + (1 if is_slow else -1))
        return slots

    def note_single(self) -> None:
        """Count a lookup for which the bounds left one key at most."""
        if self._strikes:
            self._strikes -= 1

    @property
    def exhausted(self) -> bool:
        """Whether too many keys remained too often for these columns."""
        return self._strikes >= _STRIKES

    def pays(self, tolerance: float) -> bool:
        """Whether bounding is worth a try: for a while it is not where it left too many keys."""
        if not self._pause or tolerance < self._failed_at:
            return True
        self._pause -= 1
        return False

    def pause(self, tolerance: float) -> None:
        """Have :meth:`pays` refuse this tolerance and greater ones: longer at each time."""
        self._longest_pause = min(2 * self._longest_pause, _LONGEST_PAUSE)
        self._strikes, self._pause, self._failed_at = _STRIKES - 1, self._longest_pause, tolerance

    def _split(self, query: Float32) -> Float32:
        self._head[:] = query[: self.columns]
        rest = query[self.columns :]
        norm = math.sqrt(float(rest.dot(rest)) + 1e-35)  # more than what underflows
        self._query[-2] = norm * self._upwards
        return self._query
