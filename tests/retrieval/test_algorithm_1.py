"""ProximityCache against Algorithm 1 of the paper, written down once more in float64."""

from collections.abc import Iterator

import numpy as np
import pytest

from ragcachekit.retrieval.proximity import ProximityCache
from soak_kit import soaked

DIM = 192
CAPACITY, QUERIES = 150, 2000
NOBODY = -1


def distances(metric: str, q: np.ndarray, keys: np.ndarray) -> np.ndarray:
    if metric == "l2":
        return np.sqrt(((keys - q) ** 2).sum(axis=1))
    squares = (keys * keys).sum(axis=1)
    if metric == "cosine":
        return 1 - (keys @ q) / np.sqrt(squares * (q @ q))
    return np.maximum(squares, q @ q) - keys @ q


class Algorithm1:
    """Cache lines: key, partition, id (which rises)."""

    def __init__(self, metric: str, tolerance: float) -> None:
        self.metric, self.tolerance = metric, tolerance
        self.keys, self.partitions = np.ones((CAPACITY, DIM)), np.full(CAPACITY, NOBODY)
        self.ids = np.zeros(CAPACITY, int)

    def __len__(self) -> int:
        return int((self.partitions != NOBODY).sum())

    def lookup(self, q: np.ndarray, partition: int) -> int | None:
        gaps = np.where(self.partitions == partition, distances(self.metric, q, self.keys), np.inf)
        if gaps.min() > self.tolerance:
            return None
        nearest = np.flatnonzero(gaps == gaps.min())
        # Of several nearest the equal one, else the oldest.
        line = min(nearest, key=lambda line: ((self.keys[line] != q).any(), self.ids[line]))
        return int(self.ids[line])

    def insert(self, q: np.ndarray, partition: int, number: int) -> list[int]:
        same = np.flatnonzero((self.partitions == partition) & (self.keys == q).all(axis=1))
        free = np.flatnonzero(self.partitions == NOBODY)
        if len(same) or not len(free):
            line = same[0] if len(same) else self.ids.argmin()
            left = [int(self.ids[line])]
        else:
            line, left = free[0], []
        self.keys[line], self.partitions[line], self.ids[line] = q, partition, number
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


@pytest.mark.parametrize("metric", ["cosine", "l2", "ip"])
@pytest.mark.parametrize("workload", soaked([lattice, wordings], lattice))
def test_every_hit_miss_and_eviction_is_that_of_algorithm_1(workload, metric: str) -> None:
    rng = np.random.default_rng(11)
    tolerance = (EDGES if workload is lattice else AMONG_WORDINGS)[metric]
    cache = ProximityCache(CAPACITY, tolerance, metric)
    model = Algorithm1(metric, tolerance)
    hits, left, drawn = 0, 0, workload(rng)
    for number in range(QUERIES):
        vector, partition = next(drawn), int(rng.choice(3, p=[0.75, 0.2, 0.05]))
        if rng.random() < 0.95:
            expected = model.lookup(vector.astype(np.float64), partition)
            hit = cache.lookup(vector, partition=partition)
            assert (hit and hit.results[0]) == expected
            hits += expected is not None
            if expected is not None:
                continue
        gone = model.insert(vector.astype(np.float64), partition, number)
        assert [entry.results[0] for entry in cache.insert(vector, [number], partition=partition)] == gone
        assert len(cache) == len(model)
        left += len(gone)
    stats = cache.stats()
    assert (stats.hits, stats.entries, stats.evictions + stats.replacements) == (hits, len(model), left)
    assert min(stats.hits, stats.misses, stats.evictions) > QUERIES / 50
