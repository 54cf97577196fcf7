"""Keys in a graph: what it returns is exact, equal vectors always hit, and few near ones are missed."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import numpy as np
import pytest

from query_kit import check_cache
from ragcachekit.query.keys.graph import KeyGraph
from ragcachekit.query.metrics import get_metric
from ragcachekit.query.proximity import ProximityCache

pytest.importorskip("hnswlib")
DIM = 48
TOLERANCES = {"cosine": 0.02, "l2": 0.2, "ip": 0.02}


@pytest.fixture(autouse=True)
def from_few_keys_on(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("ragcachekit.query.keys.partition_keys.GRAPH_FROM", 60)
    monkeypatch.setattr("ragcachekit.query.keys.partition_keys._BUILT_FROM", 20)
    return iter([None])


def wordings(rng: np.random.Generator, count: int, topics: np.ndarray) -> np.ndarray:
    drawn = topics[rng.integers(0, len(topics), count)] + 0.08 * rng.standard_normal((count, DIM))
    return (drawn / np.linalg.norm(drawn, axis=1, keepdims=True)).astype(np.float32)


@pytest.mark.parametrize("eviction", ["fifo", "lru", "lfu"])
@pytest.mark.parametrize("metric", ["cosine", "l2", "ip"])
def test_hits_are_exact_and_nearly_all_are_found(metric: str, eviction: str) -> None:
    rng = np.random.default_rng(1)
    topics = rng.standard_normal((900, DIM))
    graph = ProximityCache(500, TOLERANCES[metric], metric, eviction, keys="graph")
    exact = ProximityCache(500, TOLERANCES[metric], metric, eviction, keys="exact")
    hits = missed = 0
    for number, row in enumerate(wordings(rng, 4000, topics)):
        partition = 0 if number % 10 else 1  # whose keys are too few for a graph to be searched
        right = exact.lookup(row, partition=partition)
        found = graph.lookup(row, partition=partition)
        if right is None:
            assert found is None
        elif found is None:
            missed += 1
        else:
            assert found.distance >= right.distance
            hits += found == right
        if right is None or found is None:
            for cache in (graph, exact):
                cache.insert(row, [number], partition=partition)
        if number % 500 == 499:
            check_cache(graph)
            forgotten = {entry.ids for entry, _ in graph.entries()[::20]}
            for cache in (graph, exact):
                cache.forget(lambda entry, gone=forgotten: entry.ids in gone)
    assert graph._partitions[0]._graph is not None
    assert hits > 500
    assert missed <= 0.01 * (hits + missed)
    assert graph.stats().evictions > 300


def test_equal_vectors_always_hit_through_evictions_and_replacements() -> None:
    rng = np.random.default_rng(2)
    rows = rng.standard_normal((900, DIM)).astype(np.float32)
    cache = ProximityCache(300, 0.01, keys="graph")
    for number, row in enumerate(rows):
        cache.insert(row, [number], partition="p")
        if number % 3 == 0:
            cache.insert(row, [-number], partition="p")
    for number in range(600, 900):
        assert cache.lookup(rows[number], partition="p") == (((-1) ** (number % 3 == 0) * number,), 0.0)
    assert cache.lookup_many(rows[600:], partition="p") == [
        cache.lookup(row, partition="p") for row in rows[600:]
    ]
    near = (rows[600:] + np.float32(0.01)).astype(np.float32)
    assert cache.lookup_many(near, partition="p") == [cache.lookup(row, partition="p") for row in near]
    assert cache.lookup_many(near, partition="p").count(None) <= 3
    graph = cache._partitions["p"]._graph
    assert graph is not None
    assert graph._index.get_current_count() <= 300 + 1, "places of removed keys are not reused"
    check_cache(cache)


def test_what_the_graph_cannot_answer_is_scanned(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    rows = rng.standard_normal((100, DIM)).astype(np.float32)
    cache = ProximityCache(100, 0.05, keys="graph")
    for number, row in enumerate(rows):
        cache.insert(row, [number], partition="p")
    monkeypatch.setattr(KeyGraph, "candidates", lambda *_: None)
    for number, row in enumerate(rows):
        hit = cache.lookup(row + np.float32(0.001), partition="p")
        assert hit is not None
        assert hit.ids == (number,)


def test_too_few_keys_for_the_graph_to_return() -> None:
    graph = KeyGraph(DIM, get_metric("l2"), 100)
    rows = np.random.default_rng(4).standard_normal((30, DIM)).astype(np.float32)
    squares = (rows.astype(np.float64) ** 2).sum(axis=1)
    graph.add(list(range(30)), rows, squares)
    found = graph.candidates(rows[:2], squares[:2])
    assert found is not None
    assert [one[0] for one in found] == [0, 1]
    for serial in range(20):
        graph.remove(serial)
    assert graph.candidates(rows[:2], squares[:2]) is None


def test_auto_takes_a_graph_for_large_caches_if_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ProximityCache(20_000)._graph
    assert not ProximityCache(19_999)._graph
    assert not ProximityCache(20_000, keys="exact")._graph
    assert ProximityCache(3, keys="graph")._graph
    monkeypatch.setitem(sys.modules, "hnswlib", None)
    assert not ProximityCache(20_000)._graph
    with pytest.raises(ImportError, match=r"pip install hnswlib .*keys='exact'"):
        ProximityCache(3, keys="graph")
