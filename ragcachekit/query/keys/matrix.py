"""The keys of one partition as float32 rows, and the exact search for the nearest."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from ragcachekit.query.keys.leading import LEADING_COLUMNS, LeadingColumns
from ragcachekit.query.keys.vectors import Query
from ragcachekit.query.metrics import UNIT_ROUNDOFF, Float32, Float64, Metric

Nearest: TypeAlias = tuple[int | None, float]
"""Slot and distance of the nearest key; None beyond the tolerance."""

Number = TypeVar("Number", bound=np.generic)

_FIRST_ROOM = 16  # rows
_ENOUGH = 64  # keys from which on bounds are faster
_FEW = 3  # keys measured without ranking them in float32 first
_PRODUCTS = 1 << 22  # computed at a time for many queries: 16 MiB


class KeyMatrix:
    """Rows ``[size, dim]``, growing up to ``most``, with what the metric needs. Not thread safe."""

    def __init__(self, dim: int, metric: Metric, most: int) -> None:
        self.size = 0
        self._metric, self._most = metric, most
        self._dot_error = (dim + 16) * UNIT_ROUNDOFF  # bound of a dot product's error / (|q| |k|)
        self._largest = 0.0  # squared norm of any key so far
        room = min(_FIRST_ROOM, most)
        self.rows: Float32 = np.empty((room, dim), np.float32)
        self._side: Float32 = np.empty(room, np.float32)
        self.squares: Float64 = np.empty(room, np.float64)  # k.k
        self._serials: NDArray[np.int64] = np.empty(room, np.int64)
        self._leading: LeadingColumns | None = None

    def append(self, key: bytes, squared: float, serial: int) -> int:
        """Add a float32 vector with its squared norm; returns its slot, which is the last.

        Of keys at equal distances the one with the lowest ``serial`` is the nearest.
        """
        slot = self.size
        if slot == len(self.rows):
            self._grow()
        self.rows[slot] = np.frombuffer(key, np.float32)
        self.squares[slot], self._serials[slot] = squared, serial
        self._side[slot] = self._metric.side(squared)
        self._largest = max(self._largest, squared)
        self.size = slot + 1
        if self._leading is not None:
            self._leading.write(slot, self.rows[slot : slot + 1], self.squares[slot : slot + 1])
        return slot

    def remove(self, slot: int) -> None:
        """Take a key out; the last one moves into the hole, so that rows stay contiguous."""
        self.size -= 1
        if slot == self.size:
            return
        for column in (self.rows, self.squares, self._side, self._serials):
            column[slot] = column[self.size]
        if self._leading is not None:
            self._leading.move(self.size, slot)

    def nearest(self, query: Query, tolerance: float) -> Nearest:
        """The nearest of all keys."""
        leading = self._leading
        if leading is None or not leading.pays(tolerance):
            return self._nearest_of_all(query, tolerance, self.rows[: self.size].dot(query.vector))
        return self._nearest_of_bounded(query, tolerance, leading.bounds(query.vector, self.size), leading)

    def nearest_of_many(self, rows: Float32, queries: Sequence[Query], tolerance: float) -> Iterator[Nearest]:
        """As :meth:`nearest` for the queries, which are ``rows`` ``[n, dim]``, with one matrix product."""
        at_a_time = max(1, _PRODUCTS // self.size)
        for start in range(0, len(rows), at_a_time):
            some, asked = rows[start : start + at_a_time], queries[start : start + at_a_time]
            leading = self._leading
            if leading is None or not leading.pays(tolerance):
                for query, products in zip(asked, some.dot(self.rows[: self.size].T), strict=True):
                    yield self._nearest_of_all(query, tolerance, products)
            else:
                for query, bounds in zip(asked, leading.bounds_of_many(some, self.size), strict=True):
                    yield self._nearest_of_bounded(query, tolerance, bounds, leading)

    def nearest_among(self, query: Query, slots: Sequence[int], tolerance: float) -> Nearest:
        """As :meth:`nearest`, of the keys at ``slots``."""
        return self._nearest_among(query, slots, None, tolerance)

    def _nearest_among(self, query: Query, slots: Sequence[int], best: int | None, nearest: float) -> Nearest:
        """The nearest of ``slots`` and ``best``, which lies at ``nearest``, or none lies within that."""
        if len(slots) > _FEW:
            near = np.array(slots)
            products = self.rows.take(near, axis=0).dot(query.vector)
            slots = near.take(self._within(query, products, self._side.take(near), nearest)).tolist()
        for slot in slots:
            distance = self._distance(query, slot)
            if distance < nearest or (distance == nearest and (best is None or self._older(slot, best))):
                best, nearest = slot, distance
        return best, (0.0 if best is None else nearest)

    def _distance(self, query: Query, slot: int) -> float:
        key = self.rows[slot].astype(np.float64)
        return self._metric.distance(query.wide, key, query.squared, self.squares.item(slot))

    def _older(self, a: int, b: int) -> bool:
        return self._serials.item(a) < self._serials.item(b)

    def _nearest_of_bounded(
        self, query: Query, tolerance: float, bounds: Float32, leading: LeadingColumns
    ) -> Nearest:
        """The nearest key; ``bounds`` is overwritten.

        The key with the highest bound is measured first: others must be able to lie as near as it does.
        """
        first, squared = int(bounds.argmax()), query.squared
        error = leading.error(squared, self._largest)
        if bounds.item(first) < leading.least(tolerance, squared, error):
            leading.note_single()
            return None, 0.0
        distance = self._distance(query, first)
        best, nearest = (first, distance) if distance <= tolerance else (None, tolerance)
        least = leading.least(nearest, squared, error)
        bounds[first] = -math.inf  # two argmax take less time than one comparison
        if bounds.item(int(bounds.argmax())) < least:
            leading.note_single()
            return best, (0.0 if best is None else nearest)
        slots = leading.remaining(bounds, least)
        if leading.exhausted:
            self._widen(leading, tolerance)
        return self._nearest_among(query, slots, best, nearest)

    def _nearest_of_all(self, query: Query, tolerance: float, products: Float32) -> Nearest:
        near = self._within(query, products, self._side[: self.size], tolerance)
        return self.nearest_among(query, near.tolist(), tolerance)

    def _within(self, query: Query, products: Float32, side: Float32, tolerance: float) -> NDArray[np.intp]:
        """Indices of what float32 cannot tell from the nearest; empty if that is beyond the tolerance."""
        metric = self._metric
        ranks = metric.rank(products, side, query.squared)
        lowest = ranks.item(int(ranks.argmin()))
        error = metric.error(self._dot_error, query.squared, self._largest)
        limit = metric.limit(tolerance, query.squared) + error
        if lowest > limit:
            return np.empty(0, np.intp)
        return (ranks <= min(lowest + 2 * error, limit)).nonzero()[0]

    def _widen(self, leading: LeadingColumns, tolerance: float) -> None:
        wider = leading.wider()
        if wider is None:
            leading.pause(tolerance)
            return
        self._leading = wider
        wider.write(0, self.rows[: self.size], self.squares[: self.size])

    def _grow(self) -> None:
        size, room = self.size, min(self._most, 2 * len(self.rows))
        self.rows, self.squares = _roomier(self.rows, room), _roomier(self.squares, room)
        self._side, self._serials = _roomier(self._side, room), _roomier(self._serials, room)
        dim = self.rows.shape[1]
        if room >= _ENOUGH and LeadingColumns.applicable(dim):
            columns = self._leading.columns if self._leading else LEADING_COLUMNS
            self._leading = LeadingColumns(room, dim, self._metric, columns)
            self._leading.write(0, self.rows[:size], self.squares[:size])


def _roomier(rows: NDArray[Number], room: int) -> NDArray[Number]:
    """A copy with room for more rows; the new ones are not initialised."""
    out: NDArray[Number] = np.empty((room, *rows.shape[1:]), rows.dtype)
    out[: len(rows)] = rows
    return out
