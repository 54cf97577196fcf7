"""Proximity: an approximate key-value cache in front of a vector index (Proximity, section 3)."""

from __future__ import annotations

import importlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import takewhile
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ragcachekit.config import SECONDS_OR_NONE, check_number, positive
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

EVICTIONS = ("fifo", "lru")

GRAPH_FROM = 20_000
"""Keys of a partition from which on it is searched through a graph, if hnswlib is installed."""

ResultId: TypeAlias = str | int
"""What names one result of a search."""

_COUNTERS = ("hits", "misses", "inserts", "replacements", "evictions", "forgotten", "expired")
_MIN_ROWS = 16
_LINKS, _EF_CONSTRUCTION, _EF_SEARCH, _CANDIDATES = 16, 100, 64, 16  # of the graph


class Hit(NamedTuple):
    """A cached answer: ordered result ids, and the distance of its query in the unit of the metric."""

    ids: tuple[ResultId, ...]
    distance: float


class Entry(NamedTuple):
    """A cached entry: its partition and its ordered result ids."""

    partition: Hashable
    ids: tuple[ResultId, ...]


@dataclass(frozen=True)
class QueryCacheStats:
    """Counters since the cache was made.

    ``inserts = entries + replacements + evictions + forgotten + expired``.
    """

    capacity: int
    entries: int
    partitions: int
    hits: int
    misses: int
    inserts: int
    replacements: int
    evictions: int
    forgotten: int
    expired: int

    @property
    def hit_rate(self) -> float:
        """Hits / lookups, 0 before the first lookup."""
        lookups = self.hits + self.misses
        return self.hits / lookups if lookups else 0.0


class ProximityCache:
    """Query embedding -> ordered result ids; hit if the nearest key is within the tolerance. Thread safe.

    An embedding equal to an inserted one hits at any tolerance. Of other keys at equal distances the
    oldest insert is the nearest. Partitions share the capacity and the eviction order, not their keys.

    Hits and misses are those of a linear scan in float64. In a partition of 20,000 keys and more, if hnswlib
    is installed, a graph proposes the keys: a hit is still measured exactly and never beyond the tolerance,
    but a key within it may be missed, or another one within it returned.

    Parameters
    ----------
    capacity : int
        Maximum number of entries over all partitions (c in the paper).
    tolerance : float
        Maximum distance of a hit (tau), in the unit of the metric: see
        :mod:`ragcachekit.retrieval.distances`. The default 0 is equal vectors (-0.0 equals 0.0) and nothing
        else. Calibrate anything above with :func:`ragcachekit.calibrate`.
    metric : {"cosine", "l2", "ip"}
        Use that of the vector index.
    eviction : {"fifo", "lru"}
        ``fifo``: oldest insert first, a hit changes nothing (the paper's choice). ``lru``: a hit
        makes its entry the newest.
    ttl : float, optional
        Seconds after its insert at which an entry expires; a hit does not prolong them.
    dim : int, optional
        Width of the embeddings; by default that of the first insert.
    clock : callable
        Seconds that never go back, for ``ttl``.

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
        ttl: float | None = None,
        dim: int | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_number("tolerance", tolerance, "a distance")
        check_number("ttl", ttl, "a number of seconds, or None", kinds=SECONDS_OR_NONE, positive=True)
        self.capacity, self.tolerance = positive("capacity", capacity), float(tolerance)
        self.metric, self.eviction, self.ttl = check_metric(metric), eviction, ttl
        if eviction not in EVICTIONS:
            raise ValueError(f"unknown eviction {eviction!r}; known: {', '.join(EVICTIONS)}")
        self._lock, self._clock = threading.Lock(), clock
        self._order: OrderedDict[_Stored, None] = OrderedDict()  # the one that leaves next comes first
        self._ends: OrderedDict[_Stored, float] = OrderedDict()  # when they expire, in order of insertion
        self._partitions: dict[Hashable, _Keys] = {}
        self._expired: list[Entry] = []  # not yet returned by an insert
        self._size = self._serial = 0
        self._counts = dict.fromkeys(_COUNTERS, 0)
        self._dim = None if dim is None else positive("dim", dim)

    def __len__(self) -> int:
        return self.stats().entries

    def lookup(
        self,
        embedding: ArrayLike,
        *,
        partition: Hashable,
        accept: Callable[[Entry], bool] | None = None,
    ) -> Hit | None:
        """The nearest entry of ``partition`` within the tolerance, or None (Algorithm 1, lines 3-6).

        ``accept`` is called once, with the entry found; it must not call the cache. False from it is a miss,
        and not a use for LRU.

        RetrievalError for NaN or infinite numbers, a zero vector under cosine, or another width.
        """
        query = as_query(embedding, self._dim, self.metric)
        with self._lock:
            self._expire()
            keys = self._partitions.get(partition)
            stored, gap = (None, 0.0) if keys is None else keys.find(query, self.tolerance)
            if stored is None or (accept is not None and not accept(stored.entry)):
                self._counts["misses"] += 1
                return None
            self._counts["hits"] += 1
            if self.eviction == "lru":
                self._order.move_to_end(stored)
            return Hit(stored.entry.ids, gap)

    def insert(
        self, embedding: ArrayLike, ids: Sequence[ResultId], *, partition: Hashable
    ) -> tuple[Entry, ...]:
        """Insert ``ids`` for this embedding; returns the entries that left (Algorithm 1, lines 8-11).

        Among them are those that expired since the last insert. An equal embedding of the same partition is
        replaced and becomes the newest entry. TypeError for ids that are neither str nor int; RetrievalError
        as for :meth:`lookup`.
        """
        entry = Entry(partition, _checked_ids(ids))
        query = as_query(embedding, self._dim, self.metric)
        with self._lock:
            if self._dim is None:
                self._dim = query.vector.size
            elif self._dim != query.vector.size:  # two first inserts of unequal width raced
                raise RetrievalError(f"the embedding has {query.vector.size} numbers, expected {self._dim}")
            self._expire()
            left = self._take_expired()
            keys = self._partitions.get(partition)
            equal = None if keys is None else keys.equal(query)
            if equal is not None:
                left.append(self._drop(equal, "replacements"))
            elif self._size == self.capacity:
                left.append(self._drop(next(iter(self._order)), "evictions"))
            self._append(entry, query)
            return tuple(left)

    def forget(self, where: Callable[[Entry], bool]) -> tuple[Entry, ...]:
        """Drop and return the entries for which ``where`` is true; it must not call the cache.

        Entries that expired since the last insert are returned too.
        """
        with self._lock:
            self._expire()
            dropped = [stored for stored in self._order if where(stored.entry)]
            return (*self._take_expired(), *[self._drop(stored, "forgotten") for stored in dropped])

    def clear(self) -> tuple[Entry, ...]:
        """Drop and return all entries."""
        return self.forget(lambda _: True)

    def entries(self) -> list[tuple[Entry, Float32]]:
        """All entries with copies of their embeddings ``[dim]``; the one that leaves next comes first."""
        with self._lock:
            self._expire()
            return [(stored.entry, stored.keys.rows[stored.row].copy()) for stored in self._order]

    def stats(self) -> QueryCacheStats:
        """Counters and present content."""
        with self._lock:
            self._expire()
            return QueryCacheStats(self.capacity, self._size, len(self._partitions), **self._counts)

    def check(self) -> None:
        """AssertionError if the bookkeeping contradicts itself; for tests."""
        with self._lock:
            left = sum(self._counts[name] for name in ("replacements", "evictions", "forgotten", "expired"))
            assert self._counts["inserts"] == self._size + left, "inserted is not present + left"
            assert self._size <= self.capacity, "more entries than the capacity"
            ordered = list(self._order)
            assert len(ordered) == len(set(ordered)) == self._size, "the eviction order differs in number"
            assert self.ttl is None or set(self._ends) == set(ordered), "the order of age differs"
            held = [stored for keys in self._partitions.values() for stored in keys.stored]
            assert set(held) == set(ordered), "the partitions have other entries"
            for partition, keys in self._partitions.items():
                assert keys.stored, "an empty partition"
                keys.check(partition)

    def _expire(self) -> None:
        if self._ends:
            now = self._clock()
            overdue = list(takewhile(lambda stored: self._ends[stored] <= now, self._ends))
            self._expired += [self._drop(stored, "expired") for stored in overdue]

    def _take_expired(self) -> list[Entry]:
        left, self._expired = self._expired, []
        return left

    def _append(self, entry: Entry, query: Query) -> None:
        keys = self._partitions.get(entry.partition)
        if keys is None:
            keys = _Keys(entry.partition, query.vector.size, self.metric, self.capacity)
            self._partitions[entry.partition] = keys
        self._serial += 1
        self._size += 1
        self._counts["inserts"] += 1
        stored = keys.append(entry, query, self._serial)
        self._order[stored] = None
        if self.ttl is not None:
            self._ends[stored] = self._clock() + self.ttl

    def _drop(self, stored: _Stored, counter: str) -> Entry:
        del self._order[stored]
        self._ends.pop(stored, None)
        stored.keys.remove(stored)
        if not stored.keys.stored:
            del self._partitions[stored.keys.partition]
        self._size -= 1
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

    def __init__(self, partition: Hashable, dim: int, metric: str, most: int) -> None:
        self.partition, self.stored = partition, list[_Stored]()  # by row
        self._metric, self._most = metric, most
        self.rows: Float32 = np.empty((min(_MIN_ROWS, most), dim), np.float32)
        self._squares: Float64 = np.empty(len(self.rows), np.float64)  # k.k
        self._largest = 0.0  # of the squares so far
        self._by_digest: dict[int, _Stored] = {}
        self._graph: _Graph | None = None

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
        rows = None if self._graph is None else self._graph.candidates(query.vector)
        if rows is None:
            size = len(self.stored)
            products: Float32 = self.rows[:size].dot(query.vector)
            squares = self._squares[:size]
            rows = candidates(self._metric, products, squares, query, self._largest, tolerance)
        best, nearest = None, tolerance
        for stored in (self.stored[row] for row in rows):
            gap = self._distance(query, stored.row)
            if gap < nearest or (gap == nearest and (best is None or stored.serial < best.serial)):
                best, nearest = stored, gap
        return best, nearest

    def append(self, entry: Entry, query: Query, serial: int) -> _Stored:
        """Add an entry; ``serial`` rises with each call."""
        row = len(self.stored)
        if row == len(self.rows):
            room = min(self._most, 2 * row)
            self.rows, self._squares = _longer(self.rows, room), _longer(self._squares, room)
        key = query.bytes
        self.rows[row], self._squares[row] = np.frombuffer(key, np.float32), query.squared
        self._largest = max(self._largest, query.squared)
        stored = _Stored(Entry(self.partition, entry.ids), self, row, serial, hash(key))
        self.stored.append(stored)
        self._by_digest[stored.digest] = stored
        if self._graph is not None:
            self._graph.add(self.rows[row : row + 1], [stored])
        elif len(self.stored) >= GRAPH_FROM and find_spec("hnswlib") is not None:
            self._graph = _Graph(self.rows.shape[1], self._metric, self._most)
            self._graph.add(self.rows[: row + 1], self.stored)
        return stored

    def remove(self, stored: _Stored) -> None:
        """Take an entry out; the last row moves into its place, so that rows stay contiguous."""
        del self._by_digest[stored.digest]
        if self._graph is not None:
            self._graph.remove(stored)
        last = self.stored.pop()
        if last is not stored:
            self.rows[stored.row], self._squares[stored.row] = self.rows[last.row], self._squares[last.row]
            self.stored[stored.row], last.row = last, stored.row

    def check(self, partition: Hashable) -> None:
        """AssertionError if the bookkeeping contradicts itself."""
        assert self.partition is partition, "a partition is stored twice"
        assert len(self.stored) == len(self._by_digest) <= len(self.rows), "keys differ in number"
        for row, stored in enumerate(self.stored):
            assert (stored.keys, stored.row) == (self, row), "an entry points to another row"
            assert stored.entry.partition is partition, "an entry has another partition"
            assert self._by_digest[stored.digest] is stored, "a hash points to another entry"
            assert hash(self.rows[row].tobytes()) == stored.digest, "a row has another key"

    def _distance(self, query: Query, row: int) -> float:
        key = self.rows[row].astype(np.float64)
        return distance(self._metric, query.wide, key, query.squared, self._squares.item(row))


class _Graph:
    """hnswlib's graph over the keys of a partition; removed places are reused.

    It holds unit vectors under cosine. Under ``ip`` it searches by l2, as ||q - k||^2 <= 2 d.
    """

    def __init__(self, dim: int, metric: str, most: int) -> None:
        self._scales, self._most, self._marked = metric == "cosine", most, 0
        self._by_serial: dict[int, _Stored] = {}
        self._index: Any = importlib.import_module("hnswlib").Index(space="l2", dim=dim)
        room = min(2 * GRAPH_FROM, most)
        self._index.init_index(
            room, M=_LINKS, ef_construction=_EF_CONSTRUCTION, random_seed=0, allow_replace_deleted=True
        )
        self._index.set_ef(_EF_SEARCH)

    def add(self, rows: Float32, stored: Sequence[_Stored]) -> None:
        """Add keys ``[n, dim]`` of these entries."""
        needed, room = len(self._by_serial) + len(stored), self._index.get_max_elements()
        if needed > room:
            self._index.resize_index(min(self._most, max(needed, 2 * room)))
        serials = [one.serial for one in stored]
        self._index.add_items(self._scaled(rows), serials, num_threads=1, replace_deleted=bool(self._marked))
        self._marked = max(0, self._marked - len(stored))
        self._by_serial.update(zip(serials, stored, strict=True))

    def remove(self, stored: _Stored) -> None:
        """Take an entry out."""
        del self._by_serial[stored.serial]
        self._index.mark_deleted(stored.serial)
        self._marked += 1

    def candidates(self, vector: Float32) -> list[int] | None:
        """Rows of near keys; None if the graph finds too few."""
        try:
            found: NDArray[np.uint64] = self._index.knn_query(
                self._scaled(vector[None]), k=_CANDIDATES, num_threads=1
            )[0]
        except RuntimeError:  # what hnswlib raises then
            return None
        return [self._by_serial[serial].row for serial in found[0].tolist()]

    def _scaled(self, rows: Float32) -> Float32:
        if not self._scales:
            return rows
        scaled: Float32 = rows / np.linalg.norm(rows, axis=1, keepdims=True)
        return scaled


def _checked_ids(ids: Sequence[ResultId]) -> tuple[ResultId, ...]:
    if isinstance(ids, str):
        raise TypeError("ids must be a sequence of ids, not one string")
    frozen = tuple(ids)
    for one in frozen:
        if isinstance(one, bool) or not isinstance(one, str | int):
            raise TypeError(
                f"result ids are str or int, not {type(one).__name__}; convert with int() or str()"
            )
    return frozen


def _longer(rows: NDArray[Any], room: int) -> NDArray[Any]:
    """A copy with room for more rows; the new ones are not initialised."""
    out = np.empty((room, *rows.shape[1:]), rows.dtype)
    out[: len(rows)] = rows
    return out
