"""What every VectorIndex promises, run over every implementation and metric."""

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest

from ragcachekit.errors import RetrievalError
from ragcachekit.retrieval.index import VectorIndex, index_names, open_index

EXACT = {"faiss-flat"}
Make = Callable[..., VectorIndex]


CASES = [
    *product(index_names(), ["cosine"]),
    ("faiss-flat", "l2"),
    ("faiss-hnsw", "ip"),
    ("faiss-hnsw", "l2"),
]


@pytest.fixture(params=CASES, ids="-".join)
def make(request: pytest.FixtureRequest) -> Make:
    kind, metric = request.param
    return lambda dim=16: open_index(kind, dim, metric)


def rows(count: int, dim: int = 16, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, dim)).astype(np.float32)


def oracle(metric: str, query: np.ndarray, keys: np.ndarray) -> list[float]:
    """Distances in Python floats."""
    q = query.tolist()
    found = []
    for key in keys.tolist():
        dot = math.fsum(a * b for a, b in zip(q, key, strict=True))
        if metric == "l2":
            found.append(math.dist(q, key))
        elif metric == "ip":
            found.append(-dot)
        else:
            found.append(1 - dot / (math.hypot(*q) * math.hypot(*key)))
    return found


def test_finds_what_the_oracle_finds(make: Make) -> None:
    index, keys, hits = make(), rows(400), 0
    ids = [f"doc-{i}" for i in range(400)]
    index.add(ids[:250], keys[:250])
    index.add(ids[250:], keys[250:])
    for query in rows(25, seed=1):
        distances = oracle(index.metric, query, keys)
        order = sorted(range(400), key=lambda i: distances[i])[:10]
        result = index.search(query, 10)
        assert len(set(result.ids)) == len(result.ids) == len(result.scores) <= 10
        assert list(result.scores) == sorted(result.scores)
        for one, score in zip(result.ids, result.scores, strict=True):
            assert score == pytest.approx(distances[int(str(one)[4:])], abs=1e-5)
        hits += len({f"doc-{i}" for i in order} & set(result.ids))
    assert hits == 250 if index.kind in EXACT else hits >= 225


def test_k_beyond_the_size_returns_all_and_never_minus_one(make: Make) -> None:
    index = make()
    index.add([10, 11, 12], rows(3))
    result = index.search(rows(1, seed=2)[0], 50)
    assert set(result.ids) == {10, 11, 12}
    assert len(result.ids) == 3


def test_ties_go_by_id(make: Make) -> None:
    index, key = make(), rows(1)[0]
    index.add(["c", 7, "a", 3, "b"], np.tile(key, (5, 1)))
    assert index.search(key, 5).ids == (3, 7, "a", "b", "c")


def test_what_it_holds(make: Make) -> None:
    index, keys = make(), rows(100)
    keys /= np.linalg.norm(keys, axis=1, keepdims=True)
    index.add([f"d{i}" for i in range(50)], keys[:50])
    index.add(list(range(50, 100)), keys[50:])
    index.remove(["d0", 99, "unknown"])
    index.remove(["unknown"])
    assert index.version == 3
    assert index.ids == (*(f"d{i}" for i in range(1, 50)), *range(50, 99))
    assert "d1" in index
    assert "d0" not in index
    assert index.vectors(["d7", 60, "d1"]) == pytest.approx(keys[[7, 60, 1]], abs=1e-7)
    assert index.vectors([]).shape == (0, 16)
    with pytest.raises(RetrievalError, match="id 'd0' is not in the index"):
        index.vectors(["d1", "d0"])


def test_the_empty_index(make: Make) -> None:
    index = make()
    assert len(index) == 0
    index.add([], [])
    with pytest.raises(RetrievalError, match="index is empty"):
        index.search(rows(1)[0], 3)


@pytest.mark.parametrize(
    ("embedding", "error", "match"),
    [
        ([math.nan] * 4, RetrievalError, "NaN"),
        ([math.inf, 0, 0, 0], RetrievalError, "NaN or infinite"),
        ([1e30] * 4, RetrievalError, "3e18"),
        ([1.0] * 3, RetrievalError, r"\[n, 4\], got \[1, 3\]"),
        ([[1.0] * 4], RetrievalError, "one embedding"),
        (["a"] * 4, TypeError, "real numbers"),
    ],
)
def test_unusable_queries(make: Make, embedding: Any, error: type[Exception], match: str) -> None:
    index = make(4)
    index.add([1], rows(1, 4))
    with pytest.raises(error, match=match):
        index.search(embedding, 1)


@pytest.mark.parametrize("kind", index_names())
def test_zero_vectors_have_no_cosine(kind: str) -> None:
    index = open_index(kind, 2, "cosine")
    with pytest.raises(RetrievalError, match="zero vector"):
        index.add(["a"], [[0.0, 0.0]])
    index.add(["a"], [[1.0, 0.0]])
    with pytest.raises(RetrievalError, match="zero vector"):
        index.search([0.0, 0.0], 1)
    plain = open_index(kind, 2, "l2")
    plain.add(["a"], [[0.0, 0.0]])
    assert plain.search([3.0, 4.0], 1) == (("a",), (5.0,))
