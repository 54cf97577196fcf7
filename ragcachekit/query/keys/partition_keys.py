"""The entries of one partition, found by an equal or by the nearest key."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from ragcachekit.query.base import Entry
from ragcachekit.query.keys.graph import KeyGraph
from ragcachekit.query.keys.matrix import KeyMatrix, Nearest
from ragcachekit.query.keys.vectors import Query, exact_bytes
from ragcachekit.query.metrics import Float32, Metric

GRAPH_FROM = 10_000  # keys of a partition: exact search takes as long at this number
_BUILT_FROM = GRAPH_FROM // 8  # early, since it is built in one go up to there


@dataclass(eq=False, slots=True)
class Stored:
    """An entry and where it is: keys of its partition, row, number of its insert, hash of its key."""

    entry: Entry
    keys: PartitionKeys
    slot: int
    serial: int
    digest: int


Found: TypeAlias = tuple[Stored | None, float]
"""The nearest entry and its distance; None beyond the tolerance."""


class PartitionKeys:
    """Keys and entries of one partition, at most ``most``. Not thread safe."""

    def __init__(self, partition: Hashable, dim: int, metric: Metric, most: int, graph: bool) -> None:
        self.partition = partition
        self.matrix = KeyMatrix(dim, metric, most)
        self.stored: list[Stored] = []  # by slot
        self._by_digest: dict[int, Stored] = {}
        self._squares: Counter[float] = Counter()  # keys of each squared norm: few have a query's own
        self._by_serial: dict[int, Stored] = {}  # of the keys in the graph
        self._wants_graph = graph
        self._graph: KeyGraph | None = None
        self._settings = dim, metric, most

    def __len__(self) -> int:
        return len(self.stored)

    def with_digest(self, vector: bytes) -> Stored | None:
        """The entry whose key has this vector's hash: the one that an insert replaces.

        Two vectors of one 64-bit hash cannot be here together, which costs an entry if it ever happens.
        """
        return self._by_digest.get(hash(vector))

    def append(self, entry: Entry, vector: bytes, squared: float, serial: int) -> Stored:
        """Add an entry with its key, the bytes of a float32 vector; ``serial`` rises with each call."""
        slot = self.matrix.append(vector, squared, serial)
        stored = Stored(Entry(self.partition, entry.ids), self, slot, serial, hash(vector))
        self.stored.append(stored)
        self._by_digest[stored.digest] = stored
        self._squares[squared] += 1
        if self._graph is not None:
            self._add_to_graph(self._graph, [stored])
        elif self._wants_graph and len(self.stored) >= _BUILT_FROM:
            self._graph = KeyGraph(*self._settings)
            self._add_to_graph(self._graph, self.stored)
        return stored

    def remove(self, stored: Stored) -> None:
        """Take an entry out."""
        del self._by_digest[stored.digest]
        squared = self.matrix.squares.item(stored.slot)
        self._squares[squared] -= 1
        if not self._squares[squared]:
            del self._squares[squared]
        if self._graph is not None:
            del self._by_serial[stored.serial]
            self._graph.remove(stored.serial)
        self.matrix.remove(stored.slot)
        last = self.stored.pop()
        if last is not stored:
            self.stored[stored.slot] = last
            last.slot = stored.slot

    def find(self, query: Query, tolerance: float) -> Found:
        """The entry with an equal key, else the nearest one."""
        equal = self._equal(query)
        if equal is not None or not tolerance:
            return equal, 0.0
        if self._graph is not None and len(self.stored) >= GRAPH_FROM:
            return self._from_graph(self._graph, query.vector[None], [query], tolerance)[0]
        slot, distance = self.matrix.nearest(query, tolerance)
        return (None if slot is None else self.stored[slot]), distance

    def find_many(self, rows: Float32, queries: Sequence[Query], tolerance: float) -> list[Found]:
        """As :meth:`find` for the queries, which are ``rows`` ``[n, dim]``."""
        found: list[Found] = [(self._equal(query), 0.0) for query in queries]
        asked = [number for number, (equal, _) in enumerate(found) if equal is None] if tolerance else []
        if asked:
            nearest = self._nearest_of_many(rows[asked], [queries[number] for number in asked], tolerance)
            for number, one in zip(asked, nearest, strict=True):
                found[number] = one
        return found

    def _equal(self, query: Query) -> Stored | None:
        if query.squared not in self._squares:
            return None
        vector = exact_bytes(query.vector)
        stored = self._by_digest.get(hash(vector))
        is_equal = stored is not None and self.matrix.rows[stored.slot].tobytes() == vector
        return stored if is_equal else None

    def _nearest_of_many(self, rows: Float32, queries: Sequence[Query], tolerance: float) -> list[Found]:
        if self._graph is not None and len(self.stored) >= GRAPH_FROM:
            return self._from_graph(self._graph, rows, queries, tolerance)
        return [self._found(one) for one in self.matrix.nearest_of_many(rows, queries, tolerance)]

    def _found(self, nearest: Nearest) -> Found:
        slot, distance = nearest
        return (None if slot is None else self.stored[slot]), distance

    def _from_graph(
        self, graph: KeyGraph, rows: Float32, queries: Sequence[Query], tolerance: float
    ) -> list[Found]:
        candidates = graph.candidates(rows, np.array([query.squared for query in queries]))
        if candidates is None:
            return [self._found(one) for one in self.matrix.nearest_of_many(rows, queries, tolerance)]
        out = []
        for query, serials in zip(queries, candidates, strict=True):
            slots = [self._by_serial[serial].slot for serial in serials]
            out.append(self._found(self.matrix.nearest_among(query, slots, tolerance)))
        return out

    def _add_to_graph(self, graph: KeyGraph, added: Sequence[Stored]) -> None:
        first, end = added[0].slot, added[-1].slot + 1  # they are the last rows, or all
        serials = [stored.serial for stored in added]
        graph.add(serials, self.matrix.rows[first:end], self.matrix.squares[first:end])
        self._by_serial.update(zip(serials, added, strict=True))
