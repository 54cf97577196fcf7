"""What Faiss's kinds do by themselves: train lists, skip removed nodes, map files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ragcachekit.search.faiss_index import FaissHnswIndex
from ragcachekit.search.faiss_ivf import FaissIvfIndex
from ragcachekit.search.registry import load_index, open_index

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
    for mmap in (False, True):
        loaded = load_index(tmp_path / "i", mmap=mmap)
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
    for mmap in (False, True):
        loaded = load_index(tmp_path / "i", mmap=mmap)
        assert set(loaded.search(keys[0], 500).ids) == {i for i in range(500) if i % 5}
        assert loaded.remove([1]) == 1
        loaded.add([0], keys[:1])
        assert loaded.search(keys[0], 1).ids == (0,)
        assert len(loaded) == 400


@pytest.mark.parametrize("kind", ["faiss-flat", "faiss-hnsw", "faiss-ivf"])
def test_a_mapped_index_is_the_same_index(kind: str, tmp_path: Path) -> None:
    options = {"lists": 4} if kind == "faiss-ivf" else {}
    keys, index = clustered(800), open_index(kind, DIM, "l2", **options)
    index.add(list(range(800)), keys)
    index.save(tmp_path / "i")
    mapped = load_index(tmp_path / "i", mmap=True)
    for file in tmp_path.iterdir():
        file.unlink()  # another process saved
    for query in clustered(20, 3):
        assert mapped.search(query, 8) == index.search(query, 8)
        assert [*mapped.search_stages(query, 8)][-1] == index.search(query, 8)
    mapped.add(["new"], keys[:1] + 50)
    mapped.remove([3])
    assert mapped.search(keys[0] + 50, 1).ids == ("new",)
    assert 3 not in mapped.search(keys[3], 700).ids
    assert np.array_equal(mapped.vectors([5]), keys[5:6])


MEASURE = """
import sys
from ragcachekit.search.registry import load_index, open_index

def anonymous():
    lines = open("/proc/self/smaps_rollup").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))

open_index(sys.argv[3], 8)
before = anonymous()
index = load_index(sys.argv[1], mmap=sys.argv[2] == "True")
index.search(index.vectors([0])[0], 5)
print(anonymous() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("kind", ["faiss-flat", "faiss-hnsw", "faiss-ivf"])
def test_a_mapped_file_takes_no_memory_of_its_own(kind: str, tmp_path: Path) -> None:
    """10,000 vectors of 4 KB: 41 MB, which a loaded index holds and a mapped one does not."""
    options = {"faiss-ivf": {"lists": 4}, "faiss-hnsw": {"links": 4, "ef_construction": 8}}.get(kind, {})
    index = open_index(kind, 1_024, "l2", **options)
    index.add(list(range(10_000)), np.random.default_rng(0).standard_normal((10_000, 1_024)))
    index.save(tmp_path / "i")
    grown = {}
    for mmap in (False, True):
        command = [sys.executable, "-c", MEASURE, str(tmp_path / "i"), str(mmap), kind]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        grown[mmap] = int(done.stdout) * 1024
    assert grown[False] > 40e6
    assert grown[True] < 8e6
