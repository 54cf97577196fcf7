"""ProximityCache against a plain list of entries with distances in Python floats."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ragcachekit.errors import RetrievalError
from ragcachekit.retrieval.proximity import ProximityCache

DIM = 3
MARGIN = 1e-5  # draws whose answer hangs on less than this are not asked


class Kept(NamedTuple):
    partition: int
    vector: tuple[float, ...]
    ids: tuple[int, ...]


def dot(a: tuple[float, ...], b: tuple[float, ...]) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def distance(metric: str, q: tuple[float, ...], k: tuple[float, ...]) -> float:
    if metric == "l2":
        return math.dist(q, k)
    if metric == "cosine":
        return 1 - dot(q, k) / (math.hypot(*q) * math.hypot(*k))
    return max(dot(q, q), dot(k, k)) - dot(q, k)


# Few directions and lengths, all exact in float32: equal, parallel and near vectors are frequent.
coordinates = st.sampled_from([-2.0, -1.0, -0.0, 0.0, 0.5, 1.0, 1.0009765625, 2.0])
vectors = st.tuples(*[coordinates] * DIM).filter(lambda v: any(v))
partitions = st.integers(0, 2)


class ProximityMachine(RuleBasedStateMachine):
    """Entries in order of age; the oldest leaves first."""

    @initialize(
        capacity=st.integers(1, 8),
        tolerance=st.sampled_from([0.0, 0.0013, 0.07, 0.9, 3.1]),
        metric=st.sampled_from(["cosine", "l2", "ip"]),
        eviction=st.sampled_from(["fifo", "lru"]),
    )
    def start(self, capacity: int, tolerance: float, metric: str, eviction: str) -> None:
        self.cache = ProximityCache(capacity, tolerance, metric, eviction)
        self.model: list[Kept] = []
        self.capacity, self.tolerance, self.metric, self.eviction = capacity, tolerance, metric, eviction
        self.count = 0

    @rule(vector=vectors, partition=partitions)
    def insert(self, vector: tuple[float, ...], partition: int) -> None:
        self.count += 1
        gone = [k for k in self.model if k.partition == partition and k.vector == vector]
        if not gone and len(self.model) == self.capacity:
            gone = [self.model[0]]
        self.model = [k for k in self.model if k not in gone]
        self.model.append(Kept(partition, vector, (self.count,)))
        left = self.cache.insert(np.array(vector), (self.count,), partition=partition)
        assert [(e.partition, e.results) for e in left] == [(k.partition, k.ids) for k in gone]

    @rule(vector=vectors, partition=partitions)
    def lookup(self, vector: tuple[float, ...], partition: int) -> None:
        self.ask(vector, partition)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def lookup_known(self, data: st.DataObject) -> None:
        kept = data.draw(st.sampled_from(self.model))
        assert self.ask(kept.vector, kept.partition) == kept

    @precondition(lambda self: self.model)
    @rule(data=st.data(), place=st.integers(0, DIM - 1), moved=coordinates)
    def lookup_near(self, data: st.DataObject, place: int, moved: float) -> None:
        kept = data.draw(st.sampled_from(self.model))
        vector = (*kept.vector[:place], moved, *kept.vector[place + 1 :])
        if any(vector):
            self.ask(vector, kept.partition)

    def ask(self, vector: tuple[float, ...], partition: int) -> Kept | None:
        mine = [k for k in self.model if k.partition == partition]
        found = next((k for k in mine if k.vector == vector), None)
        gap = 0.0
        if found is None and self.tolerance and mine:
            gaps = sorted((distance(self.metric, vector, k.vector), i) for i, k in enumerate(mine))
            gap = gaps[0][0]
            tied = len(gaps) > 1 and gaps[1][0] - gap < MARGIN
            if abs(gap - self.tolerance) < MARGIN or (tied and gap < self.tolerance):
                return None
            found = mine[gaps[0][1]] if gap < self.tolerance else None
        hit = self.cache.lookup(list(vector), partition=partition)
        if found is None:
            assert hit is None
            return None
        event("hit nearby" if gap else "hit equal")
        assert hit is not None
        assert hit.results == found.ids
        assert hit.distance == pytest.approx(gap, abs=1e-7)
        if self.eviction == "lru":
            self.model.remove(found)
            self.model.append(found)
        return found

    @rule(partition=partitions)
    def forget(self, partition: int) -> None:
        gone = [k for k in self.model if k.partition == partition]
        self.model = [k for k in self.model if k.partition != partition]
        left = self.cache.forget(lambda entry: entry.partition == partition)
        assert [e.results for e in left] == [k.ids for k in gone]

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "cache"):
            self.cache.check()
            assert len(self.cache) == len(self.model)
            assert self.cache.stats().partitions == len({k.partition for k in self.model})


ProximityMachine.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)
TestProximityModel = ProximityMachine.TestCase


@pytest.mark.parametrize("metric", ["cosine", "l2", "ip"])
@pytest.mark.parametrize("spread", [1e-5, 1e-3, 0.3])
def test_the_nearest_of_many_in_768_dimensions(metric: str, spread: float) -> None:
    rng = np.random.default_rng(3)
    centre = rng.standard_normal(768)
    keys = (centre + spread * rng.standard_normal((200, 768))).astype(np.float32)
    cache = ProximityCache(200, 1e3, metric)
    for number, key in enumerate(keys):
        cache.insert(key, [number], partition="p")
    for _ in range(20):
        query = (centre + spread * rng.standard_normal(768)).astype(np.float32)
        gaps = [distance(metric, tuple(query.tolist()), tuple(key.tolist())) for key in keys]
        hit = cache.lookup(query, partition="p")
        assert hit is not None
        assert hit.distance == pytest.approx(min(gaps), rel=1e-6, abs=1e-9)
        assert gaps[int(hit.results[0])] == pytest.approx(min(gaps), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("metric", ["cosine", "l2", "ip"])
@pytest.mark.parametrize("spread", [1e-2, 1.0])
def test_float32_does_not_decide_at_the_tolerance(metric: str, spread: float) -> None:
    rng = np.random.default_rng(4)
    for _ in range(30):
        key = rng.standard_normal(768).astype(np.float32)
        query = (key + spread * rng.standard_normal(768)).astype(np.float32)
        gap = distance(metric, tuple(query.tolist()), tuple(key.tolist()))
        for tolerance, expected in ((gap * (1 + 1e-8), True), (gap * (1 - 1e-8), False)):
            cache = ProximityCache(1, tolerance, metric)
            cache.insert(key, ["a"], partition="p")
            assert (cache.lookup(query, partition="p") is not None) is expected


def test_l2_distances_far_below_the_rounding_of_products() -> None:
    """One bit apart: ||q||^2 + ||k||^2 - 2 q.k is a thousand times the squared distance off."""
    rng = np.random.default_rng(6)
    for number in range(50):
        key = rng.standard_normal(768).astype(np.float32)
        query = key.copy()
        query[number] = np.nextafter(query[number], np.float32(9))
        gap = distance("l2", tuple(query.tolist()), tuple(key.tolist()))
        for tolerance, expected in ((gap * (1 + 1e-8), True), (gap * (1 - 1e-8), False)):
            cache = ProximityCache(1, tolerance, "l2")
            cache.insert(key, ["a"], partition="p")
            hit = cache.lookup(query, partition="p")
            assert (hit is not None) is expected
            assert hit is None or hit.distance == pytest.approx(gap, rel=1e-12)


@pytest.mark.parametrize("metric", ["cosine", "l2", "ip"])
def test_an_equal_vector_is_found_among_neighbours_one_bit_away(metric: str) -> None:
    """Equal but for the sign of a zero, so that comparing bytes does not find it."""
    rng = np.random.default_rng(5)
    vector = rng.standard_normal(768).astype(np.float32)
    vector[0] = 0.0
    cache = ProximityCache(100, 1e-300, metric)
    for number in range(1, 60):
        near = vector.copy()
        near[number] = np.nextafter(near[number], np.float32(9))
        cache.insert(near, [number], partition="p")
    cache.insert(vector, ["equal"], partition="p")
    query = vector.copy()
    query[0] = -0.0
    assert cache.lookup(query, partition="p") == (("equal",), 0.0)


@pytest.mark.parametrize("metric", ["cosine", "ip"])
def test_unit_vectors_have_one_distance_under_cosine_and_ip(metric: str) -> None:
    cache = ProximityCache(1, 2.0, metric)
    cache.insert([1.0, 0.0], ["a"], partition="p")
    hit = cache.lookup([0.6, 0.8], partition="p")
    assert hit is not None
    assert hit.distance == pytest.approx(0.4, abs=1e-6)


def test_a_long_key_is_not_near_under_ip() -> None:
    cache = ProximityCache(4, 0.5, "ip")
    cache.insert([100.0, 0.0], ["long"], partition="p")
    assert cache.lookup([1.0, 0.0], partition="p") is None


def test_scaling_changes_nothing_under_cosine() -> None:
    cache = ProximityCache(4, 1e-9, "cosine")
    cache.insert([3.0, 4.0], ["a"], partition="p")
    assert cache.lookup([30.0, 40.0], partition="p") is not None
    with pytest.raises(RetrievalError, match="zero vector"):
        cache.lookup([0.0, 0.0], partition="p")


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"capacity": 0}, ValueError, "capacity must be > 0"),
        ({"capacity": -1}, ValueError, "capacity must be > 0"),
        ({"capacity": 2.0}, TypeError, "capacity must be an int"),
        ({"capacity": True}, TypeError, "capacity must be an int"),
        ({"capacity": 2, "tolerance": -0.1}, ValueError, "tolerance must be"),
        ({"capacity": 2, "tolerance": math.nan}, ValueError, "tolerance must be"),
        ({"capacity": 2, "tolerance": math.inf}, ValueError, "tolerance must be"),
        ({"capacity": 2, "metric": "hamming"}, ValueError, "known: cosine, ip, l2"),
        ({"capacity": 2, "eviction": "random"}, ValueError, "known: fifo, lru"),
    ],
)
def test_bad_configuration(arguments: dict[str, float], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        ProximityCache(**arguments)  # type: ignore[arg-type]
