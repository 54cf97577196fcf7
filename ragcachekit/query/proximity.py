"""Proximity: an approximate key-value cache in front of a vector index (Proximity, section 3)."""

from __future__ import annotations

import math
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import TypeAlias

from numpy.typing import ArrayLike

from ragcachekit.errors import RetrievalError
from ragcachekit.query.base import Entry, Hit, QueryCacheStats, ResultId, positive
from ragcachekit.query.matrix import KeyMatrix, as_vector, exact_bytes, widened
from ragcachekit.query.metrics import Float32, Float64, get_metric

EVICTIONS = ("fifo", "lru")

_Key: TypeAlias = tuple[int, bytes]  # the code of a partition and a vector
_HEAD = 8  # numbers of a vector that tell almost all others from it
_COUNTERS = ("hits", "misses", "inserts", "replacements", "evictions", "forgotten")


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
        self._metric = get_metric(metric)
        self._lock = threading.Lock()
        self._slots: OrderedDict[_Key, int] = OrderedDict()  # in eviction order
        self._heads: Counter[bytes] = Counter()  # of how many vectors each is the beginning
        self._keys: list[_Key] = []  # by slot, as the entries and the matrix's rows
        self._entries: list[Entry] = []
        self._partitions: dict[Hashable, tuple[int, int]] = {}  # -> code, number of entries
        self._next_code = 0
        self._counts = dict.fromkeys(_COUNTERS, 0)
        self._matrix: KeyMatrix | None = None
        self._dim: int | None = None
        if dim is not None:
            self._allocate(positive("dim", dim))

    def __len__(self) -> int:
        return len(self._keys)

    def lookup(self, embedding: ArrayLike, *, partition: Hashable) -> Hit | None:
        """The nearest entry of ``partition`` within the tolerance, or None (Algorithm 1, lines 3-6).

        RetrievalError for NaN or infinite numbers, a zero vector under cosine, or another width.
        """
        query = as_vector(embedding, self._dim)
        wide, squared = widened(query, self._metric.needs_direction)
        with self._lock:
            slot, distance = self._find(query, wide, squared, partition)
            if slot is None:
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
            code, _ = self._partitions.get(partition, (-1, 0))
            if (code, vector) in self._slots:
                left = (self._drop((code, vector)),)
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

    def stats(self) -> QueryCacheStats:
        """Counters and present content."""
        with self._lock:
            return QueryCacheStats(self.capacity, len(self._keys), len(self._partitions), **self._counts)

    def check(self) -> None:
        """Raise AssertionError if the bookkeeping contradicts itself: inserted = present + left."""
        with self._lock:
            size, counts = len(self._keys), self._counts
            left = counts["replacements"] + counts["evictions"] + counts["forgotten"]
            assert counts["inserts"] == size + left, "inserted is not present + left"
            assert size <= self.capacity, "more entries than the capacity"
            assert len(self._entries) == size == len(self._slots), "slots, keys and ids differ in number"
            heads = Counter(_head(vector) for _, vector in self._keys)
            assert heads == self._heads, "beginnings of vectors"
            assert sum(number for _, number in self._partitions.values()) == size, "partition counts"
            for slot, key in enumerate(self._keys):
                code, number = self._partitions[self._entries[slot].partition]
                assert self._slots[key] == slot, "a key points to another slot"
                assert number > 0, "an empty partition is listed"
                assert self._matrix is not None
                assert code == key[0], "a key has another partition's code"
                assert self._matrix.row(slot) == (key[1], code), "a row has another key or partition"

    def _find(
        self, query: Float32, wide: Float64, squared: float, partition: Hashable
    ) -> tuple[int | None, float]:
        code, number = self._partitions.get(partition, (-1, 0))
        if self._matrix is None or not number:
            return None, 0.0
        if not self.tolerance:
            return self._slots.get((code, exact_bytes(query))), 0.0
        # Most repeated vectors are found here in a fifth of the time. The head alone is hashed first: a whole
        # vector costs 0.7 us.
        if query[:_HEAD].tobytes() in self._heads:
            slot = self._slots.get((code, query.tobytes()))
            if slot is not None:
                return slot, 0.0
        only = None if number == len(self._keys) else code
        return self._matrix.nearest(query, wide, squared, only, self.tolerance)

    def _allocate(self, dim: int) -> KeyMatrix:
        if self._matrix is None:
            self._matrix = KeyMatrix(self.capacity, dim, self._metric)
            self._dim = dim
        elif self._dim != dim:  # two first inserts of unequal width raced
            raise RetrievalError(f"the embedding has {dim} numbers, expected {self._dim}")
        return self._matrix

    def _append(self, matrix: KeyMatrix, vector: bytes, squared: float, entry: Entry) -> None:
        slot = len(self._keys)
        code, number = self._partitions.get(entry.partition, (self._next_code, 0))
        self._next_code += not number
        self._partitions[entry.partition] = (code, number + 1)
        matrix.write(slot, vector, squared, code)
        matrix.resize(slot + 1)
        self._slots[code, vector] = slot
        self._heads[_head(vector)] += 1
        self._keys.append((code, vector))
        self._entries.append(entry)

    def _drop(self, key: _Key) -> Entry:
        """Remove one entry; the last row moves into the hole, so that rows stay contiguous."""
        assert self._matrix is not None
        hole, last = self._slots.pop(key), len(self._keys) - 1
        entry, head = self._entries[hole], _head(key[1])
        self._heads[head] -= 1
        if not self._heads[head]:
            del self._heads[head]
        code, number = self._partitions.pop(entry.partition)
        if number > 1:
            self._partitions[entry.partition] = (code, number - 1)
        if hole != last:
            self._matrix.move(last, hole)
            self._keys[hole], self._entries[hole] = self._keys[last], self._entries[last]
            self._slots[self._keys[hole]] = hole
        self._keys.pop()
        self._entries.pop()
        self._matrix.resize(last)
        return entry


def _head(vector: bytes) -> bytes:
    return vector[: 4 * _HEAD]


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
