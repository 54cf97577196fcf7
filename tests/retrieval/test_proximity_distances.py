"""Distances of ProximityCache against those in Python floats, also where float32 cannot tell."""

import itertools
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


@pytest.mark.parametrize(
    ("metric", "spread"), [("l2", 1e-5), *itertools.product(["cosine", "l2", "ip"], [1e-2, 1.0])]
)
def test_float32_does_not_decide_at_the_tolerance(metric: str, spread: float) -> None:
    """Near vectors are a thousand times nearer than float32 products can tell."""
    rng = np.random.default_rng(4)
    for _ in range(30):
        key = rng.standard_normal(768).astype(np.float32)
        query = (key + spread * rng.standard_normal(768)).astype(np.float32)
        gap = distance(metric, tuple(query.tolist()), tuple(key.tolist()))
        for tolerance, expected in ((gap * (1 + 1e-8), True), (gap * (1 - 1e-8), False)):
            cache = ProximityCache(1, tolerance, metric)
            cache.insert(key, ["a"], partition="p")
            assert (cache.lookup(query, partition="p") is not None) is expected


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
    ],
)
def test_bad_configuration(arguments: dict[str, float], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        ProximityCache(**arguments)  # type: ignore[arg-type]
