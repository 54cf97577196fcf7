"""Proximity: an approximate key-value cache in front of a vector index (Proximity, section 3)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Sequence
from functools import partial

from numpy.typing import ArrayLike

from ragcachekit.config import check_number, positive
from ragcachekit.errors import RetrievalError
from ragcachekit.query.base import Entry, Hit, QueryCacheStats, ResultId, checked_ids
from ragcachekit.query.eviction import EvictionOrder, Expiry, make_order
from ragcachekit.query.keys.graph import uses_graph
from ragcachekit.query.keys.partition_keys import Found, PartitionKeys, Stored
from ragcachekit.query.keys.vectors import as_vector, checked, checked_rows, exact_bytes
from ragcachekit.query.metrics import Float32, get_metric

_COUNTERS = ("hits", "misses", "inserts", "replacements", "evictions", "forgotten", "expired")


class ProximityCache:
    """Query embedding -> ordered result ids; hit if the nearest key is within the tolerance. Thread safe.

    An embedding equal to an inserted one hits at any tolerance. Of other keys at equal distances the
    oldest insert is the nearest. Partitions share the capacity and the eviction order, not their keys.

    The memory is about ``entries * dim * 5`` bytes, and with a graph 700 bytes per entry more.

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
    eviction : {"fifo", "lru", "lfu"}
        ``fifo``: oldest insert first, a hit changes nothing (the paper's choice). ``lru``: a hit
        makes its entry the newest. ``lfu``: fewest hits since the insert first, then the oldest insert.
    ttl : float, optional
        Seconds after its insert at which an entry expires; a hit does not prolong them.
    dim : int, optional
        Width of the embeddings; by default that of the first insert.
    keys : {"auto", "exact", "graph"}
        ``exact``: hits and misses are those of a linear scan in float64. Most keys are excluded by a bound
        from their leading columns. ``graph``: partitions of 10,000 keys and more are searched through
        graphs of hnswlib. A hit is still measured exactly and never beyond the tolerance. A key within it
        may be missed, or another one within it returned; docs/benchmarks.md says how often. ``auto``:
        graphs from a capacity of 20,000 on, if hnswlib is installed.
    clock : callable
        Seconds that never go back, for ``ttl``.

    Raises
    ------
    ValueError, TypeError
        For bad settings.
    ImportError
        For ``keys="graph"`` without hnswlib.
    """

    def __init__(
        self,
        capacity: int,
        tolerance: float = 0.0,
        metric: str = "cosine",
        eviction: str = "fifo",
        ttl: float | None = None,
        dim: int | None = None,
        keys: str = "auto",
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.capacity = positive("capacity", capacity)
        self.tolerance, self.metric, self.eviction = _checked_tolerance(tolerance), metric, eviction
        self.ttl = ttl
        self._metric = get_metric(metric)
        self._graph = uses_graph(keys, self.capacity)
        self._lock = threading.Lock()
        self._order: EvictionOrder[Stored] = make_order(eviction)
        self._expiry: Expiry[Stored] = Expiry(ttl, clock)
        self._partitions: dict[Hashable, PartitionKeys] = {}
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
        tolerance: float | None = None,
        accept: Callable[[Entry], bool] | None = None,
    ) -> Hit | None:
        """The nearest entry of ``partition`` within the tolerance, or None (Algorithm 1, lines 3-6).

        ``tolerance`` stands in for the cache's. ``accept`` is asked once, for the entry found; it must not
        call the cache. False from it is a miss, which neither LRU nor LFU takes for a use.

        RetrievalError for NaN or infinite numbers, a zero vector under cosine, or another width; ValueError
        for a bad tolerance.
        """
        within = self.tolerance if tolerance is None else _checked_tolerance(tolerance)
        query = checked(as_vector(embedding, self._dim), self._metric.needs_direction)
        with self._lock:
            self._expire()
            keys = self._partitions.get(partition)
            return self._settle((None, 0.0) if keys is None else keys.find(query, within), accept)

    def lookup_many(
        self,
        embeddings: ArrayLike,
        *,
        partition: Hashable,
        tolerance: float | None = None,
        accept: Callable[[int, Entry], bool] | None = None,
    ) -> list[Hit | None]:
        """As :meth:`lookup` for each row of ``embeddings`` ``[n, dim]`` in order, by one matrix product.

        ``accept`` is called with the number of the row and the entry.
        """
        within = self.tolerance if tolerance is None else _checked_tolerance(tolerance)
        rows, queries = checked_rows(embeddings, self._dim, self._metric.needs_direction)
        with self._lock:
            self._expire()
            keys = self._partitions.get(partition)
            found = [(None, 0.0)] * len(rows) if keys is None else keys.find_many(rows, queries, within)
            return [self._settle(one, accept and partial(accept, row)) for row, one in enumerate(found)]

    def insert(
        self, embedding: ArrayLike, ids: Sequence[ResultId], *, partition: Hashable
    ) -> tuple[Entry, ...]:
        """Insert ``ids`` for this embedding; returns the entries that left (Algorithm 1, lines 8-11).

        Among them are those that expired since the last insert. An equal embedding of the same partition is
        replaced and becomes the newest entry. TypeError for ids that are neither str nor int; RetrievalError
        as for :meth:`lookup`.
        """
        frozen = checked_ids(ids)
        query = checked(as_vector(embedding, self._dim), self._metric.needs_direction)
        vector = exact_bytes(query.vector)
        with self._lock:
            self._fix_width(query.vector.size)
            self._expire()
            left = self._reported()
            self._counts["inserts"] += 1
            keys = self._partitions.get(partition)
            equal = None if keys is None else keys.with_digest(vector)
            if equal is not None:
                left.append(self._drop(equal, "replacements"))
            elif self._size == self.capacity:
                left.append(self._drop(self._order.victim(), "evictions"))
            self._append(Entry(partition, frozen), vector, query.squared)
            return tuple(left)

    def forget(self, where: Callable[[Entry], bool]) -> tuple[Entry, ...]:
        """Drop and return the entries for which ``where`` is true; it must not call the cache.

        Entries that expired since the last insert are returned too.
        """
        with self._lock:
            self._expire()
            dropped = [stored for stored in self._order if where(stored.entry)]
            return (*self._reported(), *[self._drop(stored, "forgotten") for stored in dropped])

    def clear(self) -> tuple[Entry, ...]:
        """Drop and return all entries."""
        return self.forget(lambda _: True)

    def entries(self) -> list[tuple[Entry, Float32]]:
        """All entries with copies of their embeddings ``[dim]``; the one that leaves next comes first."""
        with self._lock:
            self._expire()
            return [(stored.entry, stored.keys.matrix.rows[stored.slot].copy()) for stored in self._order]

    def stats(self) -> QueryCacheStats:
        """Counters and present content."""
        with self._lock:
            self._expire()
            return QueryCacheStats(self.capacity, self._size, len(self._partitions), **self._counts)

    def _settle(self, found: Found, accept: Callable[[Entry], bool] | None) -> Hit | None:
        stored, distance = found
        if stored is None or (accept is not None and not accept(stored.entry)):
            self._counts["misses"] += 1
            return None
        self._counts["hits"] += 1
        self._order.touch(stored)
        return Hit(stored.entry.ids, distance)

    def _fix_width(self, dim: int) -> None:
        if self._dim is None:
            self._dim = dim
        elif self._dim != dim:  # two first inserts of unequal width raced
            raise RetrievalError(f"the embedding has {dim} numbers, expected {self._dim}")

    def _expire(self) -> None:
        if self.ttl is not None:
            self._expired += [self._drop(stored, "expired") for stored in self._expiry.overdue()]

    def _reported(self) -> list[Entry]:
        left, self._expired = self._expired, []
        return left

    def _append(self, entry: Entry, vector: bytes, squared: float) -> None:
        keys = self._partitions.get(entry.partition)
        if keys is None:
            assert self._dim is not None
            keys = PartitionKeys(entry.partition, self._dim, self._metric, self.capacity, self._graph)
            self._partitions[entry.partition] = keys
        self._serial += 1
        self._size += 1
        stored = keys.append(entry, vector, squared, self._serial)
        self._order.add(stored)
        self._expiry.add(stored)

    def _drop(self, stored: Stored, counter: str) -> Entry:
        self._order.remove(stored)
        self._expiry.remove(stored)
        stored.keys.remove(stored)
        if not len(stored.keys):
            del self._partitions[stored.keys.partition]
        self._size -= 1
        self._counts[counter] += 1
        return stored.entry


def _checked_tolerance(tolerance: float) -> float:
    check_number("tolerance", tolerance, "a distance")
    return float(tolerance)
