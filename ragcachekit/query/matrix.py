"""The keys of a query cache as one contiguous float32 matrix, and the exact scan over it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ragcachekit.query.metrics import Float32, Float64, Metric

_UNIT_ROUNDOFF = 6e-8  # float32


class KeyMatrix:
    """Rows ``[capacity, dim]``, allocated at once, with what the metric needs. Not thread safe."""

    def __init__(self, capacity: int, dim: int, metric: Metric) -> None:
        self._metric = metric
        self._rows = _aligned(capacity, dim)
        self._side: Float32 = np.empty(capacity, np.float32)
        self._products: Float64 = np.empty(capacity, np.float64)  # k.k
        self._codes: NDArray[np.int64] = np.empty(capacity, np.int64)
        self._dots: Float32 = np.empty(capacity, np.float32)
        self._near: Float64 = np.empty(dim, np.float64)  # scratch: the row nearest to a query
        self.resize(0)
        self._largest = 0.0  # squared norm of any key so far
        self._dot_error = (dim + 16) * _UNIT_ROUNDOFF  # bound of a dot product's error / (|q| |k|)

    def resize(self, size: int) -> None:
        """Make the first ``size`` rows the ones that are scanned."""
        # Slices are stored: making them anew costs a twentieth of a lookup.
        self._scanned = self._rows[:size], self._side[:size], self._dots[:size], self._codes[:size]

    def write(self, slot: int, key: bytes, squared: float, code: int) -> None:
        """Put a float32 vector, its squared norm and its partition's code into a row."""
        self._rows[slot] = np.frombuffer(key, np.float32)
        self._products[slot] = squared
        self._side[slot] = self._metric.side(squared)
        self._codes[slot] = code
        self._largest = max(self._largest, squared)

    def move(self, source: int, target: int) -> None:
        """Copy one row over another."""
        self._rows[target] = self._rows[source]
        self._products[target] = self._products[source]
        self._side[target] = self._side[source]
        self._codes[target] = self._codes[source]

    def row(self, slot: int) -> tuple[bytes, int]:
        """A row's vector and partition code."""
        return self._rows[slot].tobytes(), int(self._codes[slot])

    def nearest(
        self, query: Float32, wide: Float64, squared: float, code: int | None, tolerance: float
    ) -> tuple[int | None, float]:
        """The nearest row and its distance, or ``(None, 0.0)`` if that is beyond the tolerance.

        ``wide`` is the query in float64, ``squared`` its squared norm; with a ``code`` other
        partitions' rows are masked before the nearest is sought.
        """
        metric = self._metric
        rows, side, dots, codes = self._scanned
        ranks = metric.rank(rows.dot(query, dots), side, squared)
        if code is not None:
            ranks[codes != code] = np.inf
        best = int(ranks.argmin())
        lowest = float(ranks[best])
        error = metric.error(self._dot_error, squared, self._largest)
        limit = metric.limit(tolerance, squared) + error
        if lowest > limit:
            return None, 0.0
        slot, distance = self._measure(wide, squared, ranks, best, min(lowest + 2 * error, limit))
        return (slot, distance) if distance <= tolerance else (None, 0.0)

    def _measure(
        self, wide: Float64, squared: float, ranks: Float32, best: int, limit: float
    ) -> tuple[int, float]:
        """Measure in float64 what float32 cannot tell from the ``best``: mostly that alone."""
        lowest, ranks[best] = ranks[best], np.inf
        if ranks[ranks.argmin()] <= limit:
            ranks[best] = lowest
            best = self._nearest_of(np.flatnonzero(ranks <= limit), wide, squared)
        self._near[:] = self._rows[best]
        return best, float(self._metric.distance(wide, self._near, squared, float(self._products[best])))

    def _nearest_of(self, near: NDArray[np.intp], query: Float64, squared: float) -> int:
        keys = self._rows[near].astype(np.float64)
        equal = np.flatnonzero((keys == query).all(axis=1))
        if equal.size:  # a product of matrices may round otherwise than one of vectors
            return int(near[equal[0]])
        return int(near[self._metric.distance(query, keys, squared, self._products[near]).argmin()])


def _aligned(rows: int, dim: int) -> Float32:
    """An uninitialised float32 ``[rows, dim]`` on a 64-byte boundary: the scan is a tenth faster."""
    raw = np.empty(rows * dim + 16, np.float32)
    skip = (-raw.ctypes.data // 4) % 16
    return raw[skip : skip + rows * dim].reshape(rows, dim)
