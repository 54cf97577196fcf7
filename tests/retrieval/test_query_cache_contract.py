"""What the query cache promises, with every metric and eviction."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ragcachekit.errors import RetrievalError
from ragcachekit.retrieval.proximity import Entry, ProximityCache

Make = Callable[..., ProximityCache]
KINDS = ["cosine", "l2", "ip"]
RNG = np.random.default_rng(7)


@pytest.fixture(params=KINDS)
def make(request: pytest.FixtureRequest) -> Make:
    def build(capacity: int = 4, tolerance: float = 0.0) -> ProximityCache:
        return ProximityCache(capacity, tolerance, request.param)

    return build


def rows(count: int, dim: int = 768) -> np.ndarray:
    return RNG.standard_normal((count, dim)).astype(np.float32)


@pytest.mark.parametrize(("tolerance", "scale"), [(0.0, 1.0), (1e-12, 1e-6), (0.01, 1e6)])
def test_an_identical_vector_always_hits(make: Make, tolerance: float, scale: float) -> None:
    cache, vectors = make(64, tolerance), rows(64) * np.float32(scale)
    for number, vector in enumerate(vectors):
        cache.insert(vector, [number], partition="p")
    for number, vector in enumerate(vectors):
        assert cache.lookup(vector.copy(), partition="p") == ((number,), 0.0)


def test_at_zero_tolerance_one_bit_is_a_miss(make: Make) -> None:
    cache, vector = make(), rows(1)[0]
    cache.insert(vector, ["a"], partition="p")
    other = vector.copy()
    other[5] = np.nextafter(other[5], np.float32(9))
    assert cache.lookup(other, partition="p") is None


def test_capacity_is_shared_and_partitions_do_not_pile_up(make: Make) -> None:
    cache = make(4)
    for number, vector in enumerate(rows(50, 8)):
        cache.insert(vector, [number], partition=number)
    stats = cache.stats()
    assert (stats.entries, stats.partitions, stats.evictions) == (4, 4, 46)


def test_values_are_ordered_and_not_aliased(make: Make) -> None:
    cache, vector, ids = make(), rows(1)[0], ["b", 1, "a"]
    cache.insert(vector, ids, partition="p")
    ids.clear()
    key = vector.copy()
    vector[:] = 0.5
    assert cache.lookup(key, partition="p") == (("b", 1, "a"), 0.0)


def test_forget_and_clear(make: Make) -> None:
    cache, vectors = make(8), rows(6, 8)
    for number, vector in enumerate(vectors):
        cache.insert(vector, [number], partition=number % 2)
    gone = cache.forget(lambda entry: entry.partition == 1 or entry.results == (2,))
    assert {entry.results[0] for entry in gone} == {1, 2, 3, 5}
    assert cache.lookup(vectors[3], partition=1) is None
    assert cache.lookup(vectors[4], partition=0) == ((4,), 0.0)
    assert len(cache.forget(lambda _: True)) == 2
    assert cache.stats().entries == 0


@pytest.mark.parametrize(
    ("embedding", "match"),
    [
        ([float("nan")] * 4, "NaN or infinite"),
        ([1.0, float("inf"), 0.0, 0.0], "1 NaN or infinite"),
        ([1e300] * 4, "NaN or infinite"),
        ([1e25] * 4, "exceeds 3e18"),
        ([1.0] * 5, "has 5 numbers, expected 4"),
        ([], "empty"),
        ([[1.0] * 4], r"shape \[1, 4\]"),
    ],
)
def test_unusable_embeddings_change_nothing(make: Make, embedding: Any, match: str) -> None:
    cache = make()
    cache.insert([1.0, 2.0, 3.0, 4.0], ["a"], partition="p")
    before = cache.stats()
    with pytest.raises(RetrievalError, match=match):
        cache.lookup(embedding, partition="p")
    with pytest.raises(RetrievalError, match=match):
        cache.insert(embedding, ["b"], partition="p")
    assert cache.stats() == before


@pytest.mark.parametrize("embedding", ["text", None, [None, 1.0], ["1", "2"], [1j, 2.0], [[1.0], [1.0, 2.0]]])
def test_no_numbers_is_a_type_error(make: Make, embedding: Any) -> None:
    with pytest.raises(TypeError, match="embedding must"):
        make().lookup(embedding, partition="p")


def test_one_string_is_no_sequence_of_results(make: Make) -> None:
    cache = make()
    with pytest.raises(TypeError, match="not one string"):
        cache.insert([1.0, 2.0], "abc", partition="p")
    assert cache.stats().inserts == 0


@pytest.mark.parametrize("dtype", [np.float16, np.float64, np.int32, ">f4"])
def test_other_number_types_are_the_same_question(make: Make, dtype: Any) -> None:
    cache = make()
    cache.insert(np.array([1, 2, 3], dtype), ["a"], partition="p")
    assert cache.lookup([1.0, 2.0, 3.0], partition="p") == (("a",), 0.0)
    strided = np.array([1, 9, 2, 9, 3, 9], np.float32)[::2]
    assert cache.lookup(strided, partition="p") == (("a",), 0.0)


def test_what_is_not_accepted_is_a_miss() -> None:
    cache = ProximityCache(2, 1.0, "l2")
    cache.insert([0.0], ["near"], partition="p")
    cache.insert([0.7], ["second"], partition="p")
    asked: list[Entry] = []
    for query in ([0.1], [0.0]):
        assert cache.lookup(query, partition="p", accept=lambda entry: bool(asked.append(entry))) is None
    assert asked == [Entry("p", ("near",))] * 2  # the nearest only
    assert (cache.stats().hits, cache.stats().misses) == (0, 2)
    assert cache.insert([9.0], ["new"], partition="p") == (Entry("p", ("near",)),)
    assert cache.lookup([0.7], partition="p", accept=lambda entry: entry.results == ("second",)) is not None
    assert cache.lookup([50.0], partition="p", accept=lambda entry: pytest.fail("nothing is near")) is None
