"""Proximity: an approximate key-value cache in front of a vector index (Proximity, section 3)."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from ragcachekit.config import positive
from ragcachekit.errors import RetrievalError
from ragcachekit.query.base import Entry, Hit, QueryCacheStats, ResultId
from ragcachekit.query.matrix import KeyMatrix, as_vector, exact_bytes, widened
from ragcachekit.query.metrics import Float32, Float64, get_metric

EVICTIONS = ("fifo", "lru")

_Key: TypeAlias = tuple[int, bytes]  # the code of a partition and a vector
_COUNTERS = ("hits", "misses", "inserts", "replacements", "evictions", "forgotten")


@dataclass
class _Group:
    """The entries of one partition: its first object (they all refer to it), its code, their number."""

    partition: Hashable
    code: int
    entries: int = 0


class ProximityCache:
    """Query embedding -> ordered result ids; hit if the nearest key is within the tolerance. Thread safe.

    One exact linear scan: a float32 matrix of all keys, one BLAS matrix-vector product, argmin. Keys
    that float32 cannot tell apart, or cannot tell from the tolerance, are measured in float64. An embedding
    equal to an inserted one hits at any tolerance.

    All partitions share the matrix, the capacity and the eviction order; keys of another partition are
    masked before the nearest is sought. The memory is ``capacity * dim * 8`` bytes.

    Parameters
    ----------
    capacity : int
        Greatest number of entries over all partitions (c in the paper).
    tolerance : float
        Greatest distance of a hit (tau), in the unit of the metric: see
        :mod:`ragcachekit.query.metrics`. The default 0 is equal vectors (-0.0 equals 0.0) and nothing
        else. Calibrate anything above with :func:`ragcachekit.calibrate`.
    metric : {"cosine", "l2", "ip"}
        Use that of the vector index.
    eviction : {"fifo", "lru"}
        ``fifo``: oldest insert first, a hit changes nothing (the paper's choice). ``lru``: a hit
        makes its entry the newest.
    dim : int, optional
        Width of the embeddings; by default that of the first insert.

    Raises
    ------
    ValueError, TypeError
        For bad settings.
    """

    def __init__(
        self,
        capacity: int,
        tolerance: float = 0.0,
        metric: str = "cosine",
        eviction: str = "fifo",
        dim: int | None = None,
    ) -> None:
        self.capacity = positive("capacity", capacity)
        if not (tolerance >= 0.0 and math.isfinite(tolerance)):  # NaN fails the comparison
            raise ValueError(f"tolerance must be a finite number >= 0, got {tolerance}")
        if eviction not in EVICTIONS:
            raise ValueError(f"unknown eviction {eviction!r}; known: {', '.join(EVICTIONS)}")
        self.tolerance, self.metric, self.eviction = float(tolerance), metric, eviction
        self.ttl: float | None = None
        self._metric = get_metric(metric)
        self._lock = threading.Lock()
        self._slots: OrderedDict[_Key, int] = OrderedDict()  # in eviction order
        self._keys: list[_Key] = []  # by slot, as the entries and the matrix's rows
        self._entries: list[Entry] = []
        self._partitions: dict[Hashable, _Group] = {}
        self._next_code = 0
        self._counts = dict.fromkeys(_COUNTERS, 0)
        self._matrix: KeyMatrix | None = None
        self._dim: int | None = None
        if dim is not None:
            self._allocate(positive("dim", dim))

    def __len__(self) -> int:
        return len(self._keys)

    def lookup(
        self,
        embedding: ArrayLike,
        *,
        partition: Hashable,
        tolerance: float | None = None,
        accept: Callable[[Entry], bool] | None = None,
    ) -> Hit | None:
        """The nearest entry of ``partition`` within the tolerance, or None (Algorithm 1, lines 3-6).

        RetrievalError for NaN or infinite numbers, a zero vector under cosine, or another width.
        """
        query = as_vector(embedding, self._dim)
        wide, squared = widened(query, self._metric.needs_direction)
        with self._lock:
            within = self.tolerance if tolerance is None else tolerance
            slot, distance = self._find(query, wide, squared, partition, within)
            if slot is None or (accept is not None and not accept(self._entries[slot])):
                self._counts["misses"] += 1
                return None
            self._counts["hits"] += 1
            if self.eviction == "lru":
                self._slots.move_to_end(self._keys[slot])
            return Hit(self._entries[slot].ids, distance)

    def insert(
        self, embedding: ArrayLike, ids: Sequence[ResultId], *, partition: Hashable
    ) -> tuple[Entry, ...]:
        """Insert ``ids`` for this embedding; returns the entries that left (Algorithm 1, lines 8-11).

        An equal embedding of the same partition is replaced and becomes the newest entry. TypeError for ids
        that are neither str nor int; RetrievalError as for :meth:`lookup`.
        """
        frozen = _result_ids(ids)
        query = as_vector(embedding, self._dim)
        _, squared = widened(query, self._metric.needs_direction)
        vector = exact_bytes(query)
        with self._lock:
            matrix = self._allocate(query.size)
            self._counts["inserts"] += 1
            left: tuple[Entry, ...] = ()
            group = self._partitions.get(partition)
            if group is not None and (group.code, vector) in self._slots:
                left = (self._drop((group.code, vector)),)
                self._counts["replacements"] += 1
            elif len(self._keys) == self.capacity:
                left = (self._drop(next(iter(self._slots))),)
                self._counts["evictions"] += 1
            self._append(matrix, vector, squared, Entry(partition, frozen))
            return left

    def forget(self, where: Callable[[Entry], bool]) -> tuple[Entry, ...]:
        """Drop and return the entries for which ``where`` is true; it must not call the cache."""
        with self._lock:
            dropped = [key for key, slot in self._slots.items() if where(self._entries[slot])]
            self._counts["forgotten"] += len(dropped)
            return tuple(self._drop(key) for key in dropped)

    def clear(self) -> tuple[Entry, ...]:
        """Drop and return all entries."""
        return self.forget(lambda _: True)

    def entries(self) -> list[tuple[Entry, Float32]]:
        """All entries with copies of their embeddings ``[dim]``; the one that leaves next comes first."""
        with self._lock:
            slots = self._slots.items()
            return [(self._entries[i], np.frombuffer(key[1], np.float32).copy()) for key, i in slots]

    def stats(self) -> QueryCacheStats:
        """Counters and present content."""
        with self._lock:
            return QueryCacheStats(self.capacity, len(self._keys), len(self._partitions), **self._counts)

    def _find(
        self, query: Float32, wide: Float64, squared: float, partition: Hashable, within: float
    ) -> tuple[int | None, float]:
        group = self._partitions.get(partition)
        if self._matrix is None or group is None:
            return None, 0.0
        slot = self._slots.get((group.code, exact_bytes(query)))
        if slot is not None or not within:
            return slot, 0.0
        size = len(self._keys)
        code = None if group.entries == size else group.code
        return self._matrix.nearest(query, wide, squared, size, code, within)

    def _allocate(self, dim: int) -> KeyMatrix:
        if self._matrix is None:
            self._matrix = KeyMatrix(self.capacity, dim, self._metric)
            self._dim = dim
        elif self._dim != dim:  # two first inserts of unequal width raced
            raise RetrievalError(f"the embedding has {dim} numbers, expected {self._dim}")
        return self._matrix

    def _append(self, matrix: KeyMatrix, vector: bytes, squared: float, entry: Entry) -> None:
        slot = len(self._keys)
        group = self._partitions.get(entry.partition)
        if group is None:
            group = self._partitions[entry.partition] = _Group(entry.partition, self._next_code)
            self._next_code += 1
        group.entries += 1
        matrix.write(slot, vector, squared, group.code)
        self._slots[group.code, vector] = slot
        self._keys.append((group.code, vector))
        self._entries.append(Entry(group.partition, entry.ids))

    def _drop(self, key: _Key) -> Entry:
        """Remove one entry; the last row moves into the hole, so that rows stay contiguous."""
        assert self._matrix is not None
        hole, last = self._slots.pop(key), len(self._keys) - 1
        entry = self._entries[hole]
        group = self._partitions[entry.partition]
        group.entries -= 1
        if not group.entries:
            del self._partitions[entry.partition]
        if hole != last:
            self._matrix.move(last, hole)
            self._keys[hole], self._entries[hole] = self._keys[last], self._entries[last]
            self._slots[self._keys[hole]] = hole
        self._keys.pop()
        self._entries.pop()
        return entry


def _result_ids(ids: Sequence[ResultId]) -> tuple[ResultId, ...]:
    if isinstance(ids, str):
        raise TypeError("ids must be a sequence of ids, not one string")
    frozen = tuple(ids)
    for one in frozen:
        if isinstance(one, bool) or not isinstance(one, str | int):
            raise TypeError(
                f"result ids are str or int, not {type(one).__name__}; convert with int() or str()"
            )
    return frozen
