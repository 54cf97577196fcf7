"""What Faiss's kinds do by themselves: train lists, skip removed nodes, map files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ragcachekit.retrieval.faiss_index import FaissHnswIndex, FaissIvfIndex
from ragcachekit.retrieval.index import load_index, open_index

DIM = 16


def clustered(count: int, seed: int = 0) -> np.ndarray:
    """Around 20 centres, so that lists mean something."""
    generator = np.random.default_rng(seed)
    centres = 4 * np.random.default_rng(99).standard_normal((20, DIM))
    return (centres[generator.integers(0, 20, count)] + generator.standard_normal((count, DIM))).astype("f4")


def nearest(keys: np.ndarray, query: np.ndarray, k: int) -> list[int]:
    return np.argsort(np.linalg.norm(keys.astype(np.float64) - query, axis=1))[:k].tolist()


def recall(index: FaissIvfIndex, keys: np.ndarray, k: int = 10) -> float:
    queries = clustered(100, 7)
    return float(np.mean([len({*index.search(q, k).ids} & {*nearest(keys, q, k)}) / k for q in queries]))


def test_lists_are_trained_when_there_are_enough_vectors() -> None:
    keys, index = clustered(6_000), FaissIvfIndex(DIM, "l2", lists=16, probes=1)
    index.add(list(range(623)), keys[:623])
    assert index._trained == 0
    assert recall(index, keys[:623]) == 1
    index.add([623], keys[623:624])
    assert index._trained == 39 * 16
    assert 0.7 < recall(index, keys[:624]) < 1
    index.add(list(range(624, 2_495)), keys[624:2_495])
    assert index._trained == 39 * 16
    index.add([2_495], keys[2_495:2_496])
    assert index._trained == 4 * 39 * 16
    assert recall(index, keys[:2_496]) > 0.7
    assert len(index) == 2_496
    assert np.array_equal(index.vectors([5, 2_495, 700]), keys[[5, 2_495, 700]])


def test_all_lists_are_all_vectors() -> None:
    keys, index = clustered(1_000), FaissIvfIndex(DIM, "l2", lists=16, probes=99)
    index.add(list(range(500)), keys[:500])
    index.add(list(range(500, 1_000)), keys[500:])
    assert index._trained == 1_000
    assert recall(index, keys) == 1


def test_trained_lists_are_saved(tmp_path: Path) -> None:
    keys, index = clustered(3_000), FaissIvfIndex(DIM, "cosine", lists=8, probes=2)
    index.add(list(range(400)), keys[:400])
    index.add(list(range(400, 900)), keys[400:900])
    index.remove(list(range(0, 900, 3)))
    index.save(tmp_path / "i")
    loaded = load_index(tmp_path / "i")
    assert isinstance(loaded, FaissIvfIndex)
    assert loaded._trained == 400
    assert loaded.options() == {"lists": 8, "probes": 2}
    for query in clustered(20, 3):
        assert loaded.search(query, 8) == index.search(query, 8)
    assert loaded.remove([1, 2]) == 2
    loaded.add([0, 1], keys[:2])
    assert len(loaded) == 600
    assert loaded.search(keys[1], 1).ids == (1,)
    loaded.add(list(range(900, 2_000)), keys[900:2_000])
    assert loaded._trained == 1_700


@pytest.mark.parametrize("metric", ["l2", "cosine"])
def test_a_graph_skips_what_was_removed(metric: str) -> None:
    keys, kept = clustered(2_000), np.ones(2_000, bool)
    units = keys / np.linalg.norm(keys, axis=1, keepdims=True)
    index = open_index("faiss-hnsw", DIM, metric)
    index.add(list(range(2_000)), keys)
    assert isinstance(index, FaissHnswIndex)
    for query in clustered(12, 5):  # the neighbours of a query go: those that a search walks through
        gone = [one for one in index.search(query, 45).ids if isinstance(one, int)]
        kept[gone] = False
        assert index.remove(gone) == len(gone)
    for query in clustered(50, 5):
        scores = np.linalg.norm(keys - query, axis=1) if metric == "l2" else -units @ query
        true = [one for one in np.argsort(scores).tolist() if kept[one]][:10]
        found = index.search(query, 10).ids
        assert kept[list(found)].all()  # type: ignore[arg-type]
        assert len(set(found) & set(true)) >= 9
    assert index._index.ntotal == 2_000
    index.remove(np.flatnonzero(kept)[:61].tolist())
    assert index._index.ntotal == len(index) == 2_000 - 12 * 45 - 61


def test_removed_nodes_are_remembered_by_the_file(tmp_path: Path) -> None:
    keys, index = clustered(500), open_index("faiss-hnsw", DIM, "l2")
    index.add(list(range(500)), keys)
    index.remove(list(range(0, 500, 5)))
    index.save(tmp_path / "i")
    loaded = load_index(tmp_path / "i")
    assert set(loaded.search(keys[0], 500).ids) == {i for i in range(500) if i % 5}
    assert loaded.remove([1]) == 1
    loaded.add([0], keys[:1])
    assert loaded.search(keys[0], 1).ids == (0,)
    assert len(loaded) == 400
