"""The tolerance that keeps different questions apart."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragcachekit.errors import RetrievalError
from ragcachekit.retrieval.distances import calibrate
from ragcachekit.retrieval.proximity import ProximityCache


def at(distances: list[float]) -> tuple[np.ndarray, np.ndarray]:
    """Pairs on a line with these l2 distances."""
    return np.zeros((len(distances), 1)), np.array(distances, np.float32)[:, None]


def test_the_largest_tolerance_below_the_first_false_hit() -> None:
    result = calibrate(at([1, 2, 3, 5]), at([4, 6, 8]), metric="l2")
    assert result.tolerance == pytest.approx(4, rel=1e-5)
    assert result.tolerance < 4
    assert (result.hit_rate, result.false_hit_rate) == (0.75, 0.0)
    assert (result.same_pairs, result.different_pairs) == (4, 3)
    assert "4 rewordings" in str(result)


def test_all_false_hits_allowed_takes_everything() -> None:
    result = calibrate(at([5]), at([1, 2]), metric="l2", max_false_hit_rate=1.0)
    assert (result.tolerance, result.hit_rate, result.false_hit_rate) == (5, 1.0, 1.0)


def test_equal_different_pairs_leave_only_exact_matching() -> None:
    result = calibrate(at([1]), at([0, 2]), metric="l2")
    assert (result.tolerance, result.hit_rate, result.false_hit_rate) == (0, 0.0, 0.5)


numbers = st.lists(st.integers(1, 40).map(lambda n: n / 8), min_size=1, max_size=12)


@settings(max_examples=80, deadline=None)
@given(same=numbers, different=numbers, bound=st.sampled_from([0.0, 0.1, 0.25, 0.29, 0.5]))
def test_largest_that_keeps_the_bound(same: list[float], different: list[float], bound: float) -> None:
    result = calibrate(at(same), at(different), metric="l2", max_false_hit_rate=bound)
    assert sum(d <= result.tolerance for d in different) <= bound * len(different) + 1e-9
    wider = result.tolerance * (1 + 1e-5)
    assert sum(d <= wider for d in different) > bound * len(different)
    assert result.hit_rate == sum(d <= result.tolerance for d in same) / len(same)


@pytest.mark.parametrize("metric", ["cosine", "l2", "ip"])
def test_the_cache_measures_as_the_calibration_does(metric: str) -> None:
    rng = np.random.default_rng(0)
    base = rng.standard_normal((40, 32))
    reworded, others = base + 0.05 * rng.standard_normal((40, 32)), rng.standard_normal((40, 32))
    result = calibrate((base, reworded), (base, others), metric=metric)
    hits = {"same": 0, "different": 0}
    for name, side in (("same", reworded), ("different", others)):
        for key, query in zip(base, side, strict=True):
            cache = ProximityCache(1, result.tolerance, metric)
            cache.insert(key, [1], partition="p")
            hits[name] += cache.lookup(query, partition="p") is not None
    assert hits == {"same": result.hit_rate * 40, "different": 0}
    assert result.hit_rate == 1.0


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"max_false_hit_rate": -0.1}, ValueError, "between 0 and 1"),
        ({"max_false_hit_rate": math.nan}, ValueError, "between 0 and 1"),
        ({"metric": "hamming"}, ValueError, "known"),
        ({"same": ([[1.0, 2.0]], [[1.0]])}, ValueError, "equal shapes"),
        ({"same": (np.empty((0, 2)), np.empty((0, 2)))}, ValueError, "equal shapes"),
        ({"same": ([1.0], [1.0])}, ValueError, r"\[pairs, dim\]"),
        ({"different": ([[math.nan]], [[1.0]])}, RetrievalError, "NaN"),
        ({"different": ([[0.0]], [[1.0]])}, RetrievalError, "zero vector"),
    ],
)
def test_bad_input(arguments: dict[str, Any], error: type[Exception], match: str) -> None:
    pairs = {"same": ([[1.0]], [[1.0]]), "different": ([[1.0]], [[2.0]])}
    given = {**pairs, **arguments}
    with pytest.raises(error, match=match):
        calibrate(given.pop("same"), given.pop("different"), **given)
