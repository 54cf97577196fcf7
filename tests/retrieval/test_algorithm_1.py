"""ProximityCache against Algorithm 1 of the paper, written down once more in float64."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest

from ragcachekit.retrieval.proximity import ProximityCache

DIM = 192
CAPACITY = 150
TTL = 250.0
NOBODY = -1


def distances(metric: str, q: np.ndarray, keys: np.ndarray) -> np.ndarray:
    if metric == "l2":
        return np.sqrt(((keys - q) ** 2).sum(axis=1))
    squares = (keys * keys).sum(axis=1)
    if metric == "cosine":
        return 1 - (keys @ q) / np.sqrt(squares * (q @ q))
    return np.maximum(squares, q @ q) - keys @ q


class Algorithm1:
    """Cache lines: key, partition, id (which rises), time of insert, time of last use, hits."""

    def __init__(self, metric: str, tolerance: float, eviction: str, ttl: float) -> None:
        self.metric, self.tolerance, self.eviction, self.ttl = metric, tolerance, eviction, ttl
        self.keys, self.partitions = np.ones((CAPACITY, DIM)), np.full(CAPACITY, NOBODY)
        self.ids, self.born, self.used, self.hits = np.zeros((4, CAPACITY), int)
        self.uses = 0

    def __len__(self) -> int:
        return int((self.partitions != NOBODY).sum())

    def expire(self, now: int) -> list[int]:
        gone = np.flatnonzero((self.partitions != NOBODY) & (now - self.born >= self.ttl))
        self.partitions[gone] = NOBODY
        return sorted(self.ids[gone].tolist())

    def lookup(self, q: np.ndarray, partition: int) -> int | None:
        gaps = np.where(self.partitions == partition, distances(self.metric, q, self.keys), np.inf)
        if gaps.min() > self.tolerance:
            return None
        nearest = np.flatnonzero(gaps == gaps.min())
        # Of several nearest the equal one, else the oldest.
        line = min(nearest, key=lambda line: ((self.keys[line] != q).any(), self.ids[line]))
        self.uses += 1
        self.used[line], self.hits[line] = self.uses, self.hits[line] + 1
        return int(self.ids[line])

    def insert(self, q: np.ndarray, partition: int, number: int, now: int) -> list[int]:
        same = np.flatnonzero((self.partitions == partition) & (self.keys == q).all(axis=1))
        free = np.flatnonzero(self.partitions == NOBODY)
        if len(same) or not len(free):
            order = {"fifo": self.ids, "lru": self.used}[self.eviction]
            line = same[0] if len(same) else order.argmin()
            left = [int(self.ids[line])]
        else:
            line, left = free[0], []
        self.uses += 1
        self.keys[line], self.partitions[line], self.ids[line] = q, partition, number
        self.born[line], self.used[line], self.hits[line] = now, self.uses, 0
        return left


def lattice(rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Products and norms are whole numbers: ties and distances equal to the tolerance are the rule."""
    places = rng.choice(DIM, 20, replace=False)
    while True:
        vector = np.zeros(DIM, np.float32)
        vector[rng.choice(places, 4, replace=False)] = rng.choice([1, 1, 2])
        yield vector


def wordings(rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Questions in wordings as far apart as the tolerance, or nearer than float32 products can tell."""
    topics = rng.standard_normal((300, DIM))
    while True:
        topic = topics[min(int(rng.exponential(60)), 299)]
        spread = rng.choice([0.0, 1e-5, 1e-3, 0.1, 0.32, 0.6])
        yield (topic + spread * rng.standard_normal(DIM)).astype(np.float32)


EDGES = {"cosine": 0.25, "l2": 2.0, "ip": 1.0}
AMONG_WORDINGS = {"cosine": 0.05, "l2": 4.4, "ip": 9.6}


@pytest.mark.parametrize(("eviction", "queries"), [("fifo", 10_000), ("lru", 2500), ("ttl", 2500)])
@pytest.mark.parametrize("metric", ["cosine", "l2", "ip"])
@pytest.mark.parametrize("workload", [lattice, wordings])
def test_every_hit_miss_and_eviction_is_that_of_algorithm_1(
    workload, metric: str, eviction: str, queries: int
) -> None:
    rng, now = np.random.default_rng(11), 0
    tolerance = (EDGES if workload is lattice else AMONG_WORDINGS)[metric]
    ttl, order = (TTL, "fifo") if eviction == "ttl" else (None, eviction)
    cache = ProximityCache(CAPACITY, tolerance, metric, order, ttl=ttl, clock=lambda: now)
    model = Algorithm1(metric, tolerance, order, ttl or math.inf)
    hits, left, expired, drawn = 0, [], [], workload(rng)
    for number in range(queries):
        now += int(rng.integers(0, 4))
        vector, partition = next(drawn), int(rng.choice(3, p=[0.75, 0.2, 0.05]))
        expired += model.expire(now)
        if rng.random() < 0.95:
            expected = model.lookup(vector.astype(np.float64), partition)
            hit = cache.lookup(vector, partition=partition)
            assert (hit and hit.ids[0]) == expected
            hits += expected is not None
            if expected is not None:
                continue
        left += expired + model.insert(vector.astype(np.float64), partition, number, now)
        gone = cache.insert(vector, [number], partition=partition)
        assert [entry.ids[0] for entry in gone] == left[len(left) - len(gone) :]
        assert len(cache) == len(model)
        expired = []
    stats = cache.stats()
    cache.check()
    assert (stats.hits, stats.entries) == (hits, len(model))
    assert stats.expired + stats.evictions + stats.replacements == len(left) + len(expired)
    assert min(stats.hits, stats.misses, stats.expired if ttl else stats.evictions) > queries / 50
