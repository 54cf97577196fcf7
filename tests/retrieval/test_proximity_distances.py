"""Distances of ProximityCache against those in Python floats, also where float32 cannot tell."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ragcachekit.errors import RetrievalError
from ragcachekit.retrieval.proximity import ProximityCache


def dot(a: tuple[float, ...], b: tuple[float, ...]) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def distance(metric: str, q: tuple[float, ...], k: tuple[float, ...]) -> float:
    if metric == "l2":
        return math.dist(q, k)
    if metric == "cosine":
        return 1 - dot(q, k) / (math.hypot(*q) * math.hypot(*k))
    return max(dot(q, q), dot(k, k)) - dot(q, k)


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
