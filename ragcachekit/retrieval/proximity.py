"""Proximity: an approximate key-value cache in front of a vector index (Proximity, section 3)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from ragcachekit.errors import RetrievalError
from ragcachekit.retrieval.distances import (
    Float32,
    Float64,
    Query,
    as_query,
    candidates,
    check_metric,
    distance,
)
from ragcachekit.types import check_number, positive

_COUNTERS = ("hits", "misses", "inserts", "replacements", "evictions", "forgotten")
_MIN_ROWS = 16


class Hit(NamedTuple):
    """A cached answer: ordered results, and the distance of its query in the unit of the metric."""

    results: tuple[Any, ...]
    distance: float


class Entry(NamedTuple):
    """A cached entry: its partition and its ordered results."""

    partition: Hashable
    results: tuple[Any, ...]


@dataclass(frozen=True)
class QueryCacheStats:
    """Counters since the cache was made: ``inserts = entries + replacements + evictions + forgotten``."""

    capacity: int
    entries: int
    partitions: int
    hits: int
    misses: int
    inserts: int
    replacements: int
    evictions: int
    forgotten: int

    @property
    def hit_rate(self) -> float:
        """Hits / lookups, 0 before the first lookup."""
        lookups = self.hits + self.misses
        return self.hits / lookups if lookups else 0.0


class ProximityCache:
    """Query embedding -> ordered results; hit if the nearest key is within the tolerance. Thread safe.

    An embedding equal to an inserted one hits at any tolerance. Among other keys at equal distances, the
    oldest counts as the nearest. Partitions share the capacity and the eviction order, not their keys.

    A lookup reads all keys of its partition: hits and misses are those of a linear scan in float64. Beyond
    some 20,000 keys that takes longer than many a search.

    Parameters
    ----------
    capacity : int
        Maximum number of entries over all partitions (c in the paper). The oldest insert leaves first.
    tolerance : float
        Maximum distance of a hit (tau), in the unit of the metric: see
        :mod:`ragcachekit.retrieval.distances`. The default 0 is equal vectors (-0.0 equals 0.0) and nothing
        else. Calibrate anything above with :func:`ragcachekit.calibrate`.
    metric : {"cosine", "l2", "ip"}
        Use that of the vector index.

    Raises
    ------
    ValueError, TypeError
        For bad settings.
    """

    def __init__(self, capacity: int, tolerance: float = 0.0, metric: str = "cosine") -> None:
        check_number("tolerance", tolerance, "a distance")
        self.capacity, self.tolerance = positive("capacity", capacity), float(tolerance)
        self.metric = check_metric(metric)
        self._lock = threading.Lock()
        self._order: dict[_Stored, None] = {}  # the one that leaves next comes first
        self._partitions: dict[Hashable, _Keys] = {}
        self._counts = dict.fromkeys(_COUNTERS, 0)
        self._dim: int | None = None  # that of the first insert

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, partition: object) -> bool:
        return partition in self._partitions

    def lookup(
        self,
        embedding: ArrayLike,
        *,
        partition: Hashable,
        accept: Callable[[Entry], bool] | None = None,
    ) -> Hit | None:
        """The nearest entry of ``partition`` within the tolerance, or None (Algorithm 1, lines 3-6).

        ``accept`` is called once, with the entry found; it must not call the cache. False from it is a miss.

        RetrievalError for NaN or infinite numbers, a zero vector under cosine, or another width.
        """
        query = as_query(embedding, self._dim, self.metric)
        with self._lock:
            keys = self._partitions.get(partition)
            stored, gap = (None, 0.0) if keys is None else keys.find(query, self.tolerance)
            if stored is None or (accept is not None and not accept(stored.entry)):
                self._counts["misses"] += 1
                return None
            self._counts["hits"] += 1
            return Hit(stored.entry.results, gap)

    def insert(
        self, embedding: ArrayLike, results: Sequence[Any], *, partition: Hashable
    ) -> tuple[Entry, ...]:
        """Insert ``results`` for this embedding; returns the entries that left (Algorithm 1, lines 8-11).

        An equal embedding of the same partition is replaced and becomes the newest entry. TypeError for one
        string; RetrievalError as for :meth:`lookup`.
        """
        if isinstance(results, str):
            raise TypeError("results must be a sequence, not one string")
        frozen, query = tuple(results), as_query(embedding, self._dim, self.metric)
        with self._lock:
            if self._dim is None:
                self._dim = query.vector.size
            elif self._dim != query.vector.size:  # two first inserts of unequal width raced
                raise RetrievalError(f"the embedding has {query.vector.size} numbers, expected {self._dim}")
            keys, left = self._partitions.get(partition), list[Entry]()
            equal = None if keys is None else keys.equal(query)
            if equal is not None:
                left.append(self._drop(equal, "replacements"))
            elif len(self._order) == self.capacity:
                left.append(self._drop(next(iter(self._order)), "evictions"))
            if (keys := self._partitions.get(partition)) is None:
                keys = self._partitions[partition] = _Keys(query.vector.size, self.metric, self.capacity)
            self._counts["inserts"] += 1
            self._order[keys.append(Entry(partition, frozen), query, self._counts["inserts"])] = None
            return tuple(left)

    def forget(self, where: Callable[[Entry], bool]) -> tuple[Entry, ...]:
        """Drop and return the entries for which ``where`` is true; it must not call the cache."""
        with self._lock:
            dropped = [stored for stored in self._order if where(stored.entry)]
            return tuple([self._drop(stored, "forgotten") for stored in dropped])

    def stats(self) -> QueryCacheStats:
        """Counters and present content."""
        with self._lock:
            return QueryCacheStats(self.capacity, len(self), len(self._partitions), **self._counts)

    def _drop(self, stored: _Stored, counter: str) -> Entry:
        del self._order[stored]
        stored.keys.remove(stored)
        if not stored.keys.stored:
            del self._partitions[stored.entry.partition]
        self._counts[counter] += 1
        return stored.entry


@dataclass(eq=False, slots=True)
class _Stored:
    """An entry and where it is: keys of its partition, row, number of its insert, hash of its key."""

    entry: Entry
    keys: _Keys
    row: int
    serial: int
    digest: int


class _Keys:
    """Keys ``[size, dim]`` and entries of one partition, at most ``most``."""

    def __init__(self, dim: int, metric: str, most: int) -> None:
        self.stored = list[_Stored]()  # by row
        self._metric, self._most = metric, most
        self.rows: Float32 = np.empty((min(_MIN_ROWS, most), dim), np.float32)
        self._squares: Float64 = np.empty(len(self.rows), np.float64)  # k.k
        self._largest = 0.0  # of the squares so far
        self._by_digest: dict[int, _Stored] = {}

    def equal(self, query: Query) -> _Stored | None:
        """The entry whose key has this vector's hash: the one that an insert replaces.

        Two vectors of one 64-bit hash cannot both be here, which costs an entry if it ever happens.
        """
        return self._by_digest.get(hash(query.bytes))

    def find(self, query: Query, tolerance: float) -> tuple[_Stored | None, float]:
        """The entry with an equal key, else the nearest one, and its distance; None beyond the tolerance."""
        equal = self.equal(query)
        if equal is not None and self.rows[equal.row].tobytes() == query.bytes:
            return equal, 0.0
        if not tolerance:
            return None, 0.0
        size = len(self.stored)
        products: Float32 = self.rows[:size].dot(query.vector)
        rows = candidates(self._metric, products, self._squares[:size], query, self._largest, tolerance)
        best, nearest = None, tolerance
        for stored in (self.stored[row] for row in rows):
            key = self.rows[stored.row].astype(np.float64)
            gap = distance(self._metric, query.wide, key, query.squared, self._squares.item(stored.row))
            if gap < nearest or (gap == nearest and (best is None or stored.serial < best.serial)):
                best, nearest = stored, gap
        return best, nearest

    def append(self, entry: Entry, query: Query, serial: int) -> _Stored:
        """Add an entry; ``serial`` rises with each call."""
        row, key = len(self.stored), query.bytes
        if row == len(self.rows):
            room = min(self._most, 2 * row)  # np.resize repeats what is there in the new rows
            self.rows = np.resize(self.rows, (room, self.rows.shape[1]))
            self._squares = np.resize(self._squares, room)
        self.rows[row], self._squares[row] = np.frombuffer(key, np.float32), query.squared
        self._largest = max(self._largest, query.squared)
        stored = _Stored(entry, self, row, serial, hash(key))
        self.stored.append(stored)
        self._by_digest[stored.digest] = stored
        return stored

    def remove(self, stored: _Stored) -> None:
        """Take an entry out; the last row moves into its place, so that rows stay contiguous."""
        del self._by_digest[stored.digest]
        last = self.stored.pop()
        if last is not stored:
            self.rows[stored.row], self._squares[stored.row] = self.rows[last.row], self._squares[last.row]
            self.stored[stored.row], last.row = last, stored.row
