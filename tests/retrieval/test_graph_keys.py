"""Partitions that are large enough for a graph: hits stay exact, and near keys are found."""

from __future__ import annotations

import numpy as np
import pytest

from ragcachekit import ProximityCache

pytest.importorskip("hnswlib")

RNG = np.random.default_rng(5)
TOLERANCES = {"cosine": 0.05, "l2": 0.3, "ip": 0.05}


@pytest.fixture(autouse=True)
def early_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ragcachekit.retrieval.proximity.GRAPH_FROM", 60)


def unit(rows: np.ndarray) -> np.ndarray:
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


@pytest.mark.parametrize("metric", ["cosine", "l2", "ip"])
@pytest.mark.parametrize("eviction", ["fifo", "lru"])
def test_a_graph_finds_what_a_scan_finds(metric: str, eviction: str) -> None:
    """While entries come, leave and are replaced; a hit is never beyond the tolerance."""
    cache = ProximityCache(500, TOLERANCES[metric], metric, eviction)
    keys = unit(RNG.standard_normal((1500, 24)))
    hits = expected = 0
    for number, key in enumerate(keys):
        cache.insert(key, [number], partition="p")
        if number % 10:
            continue
        if number % 300 == 290:
            gone = {entry.ids for entry, _ in cache.entries()[::20]}
            cache.forget(lambda entry, gone=gone: entry.ids in gone)
            cache.check()
        near = unit(keys[max(0, number - 3)][None] + 0.01 * RNG.standard_normal((1, 24)))[0]
        hit = cache.lookup(near, partition="p")
        held = cache.entries()
        gaps = {entry.ids: gap(metric, near, kept) for entry, kept in held}
        best = min(gaps, key=gaps.__getitem__)
        expected += gaps[best] <= cache.tolerance
        if hit is not None:
            hits += hit.ids == best
            assert hit.distance == pytest.approx(gaps[hit.ids], abs=1e-6)
            assert hit.distance <= cache.tolerance
    cache.check()
    assert expected > 100
    assert hits >= 0.97 * expected


def gap(metric: str, query: np.ndarray, key: np.ndarray) -> float:
    q, k = query.astype(float), key.astype(float)
    if metric == "l2":
        return float(np.linalg.norm(q - k))
    if metric == "cosine":
        return float(1 - q @ k / np.linalg.norm(q) / np.linalg.norm(k))
    return float(max(q @ q, k @ k) - q @ k)


def test_equal_vectors_hit_and_others_do_not_at_tolerance_zero() -> None:
    cache = ProximityCache(200)
    keys = unit(RNG.standard_normal((200, 8)))
    for number, key in enumerate(keys):
        cache.insert(key, [number], partition="p")
    assert all(cache.lookup(key, partition="p") == ((n,), 0.0) for n, key in enumerate(keys))
    assert cache.lookup(keys[0] * np.float32(1.0001), partition="p") is None


def test_a_graph_that_finds_too_few_is_scanned() -> None:
    """Nearly all keys removed: hnswlib raises, and the scan answers."""
    cache = ProximityCache(100, 0.05)
    keys = unit(RNG.standard_normal((100, 8)))
    for number, key in enumerate(keys):
        cache.insert(key, [number], partition="p")
    cache.forget(lambda entry: entry.ids[0] >= 3)
    assert cache.lookup(keys[1] + np.float32(1e-4), partition="p").ids == (1,)
    assert cache.lookup(-keys[1], partition="p") is None
    cache.check()
