"""Saving, loading, and refusing what was altered."""

from pathlib import Path

import numpy as np
import pytest

from ragcachekit.errors import RetrievalError
from ragcachekit.retrieval.index import VectorIndex, index_names, load_index, open_index

KEYS = np.random.default_rng(5).standard_normal((40, 8)).astype(np.float32)
IDS: list[str | int] = [f"é-{i}" if i % 2 else i for i in range(40)]


@pytest.fixture(params=index_names())
def index(request: pytest.FixtureRequest) -> VectorIndex:
    made = open_index(request.param, 8, "l2")
    made.add(IDS, KEYS)
    return made


def flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(bytes(raw))


def test_what_was_saved_loads_and_grows(index: VectorIndex, tmp_path: Path) -> None:
    path = tmp_path / "index.json"
    index.save(path)
    loaded = load_index(path)
    assert (loaded.kind, loaded.dim, loaded.metric, len(loaded)) == (index.kind, 8, "l2", 40)
    for query in KEYS[:5] + 0.1:
        assert loaded.search(query, 7) == index.search(query, 7)
    loaded.add(["new"], KEYS[:1] + 100)
    assert loaded.search(KEYS[0] + 100, 1).ids == ("new",)
    assert len(loaded.search(KEYS[0], 100).ids) == 41


def test_a_flipped_bit_anywhere_is_refused(index: VectorIndex, tmp_path: Path) -> None:
    path = tmp_path / "i"
    index.save(path)
    size = path.stat().st_size
    for at in (0, 64, 70, size // 3, size // 2, size - 2):
        flip(path, at)
        with pytest.raises(RetrievalError, match="damaged"):
            load_index(path)
        flip(path, at)
    assert len(load_index(path)) == 40


def test_a_cut_or_missing_file_is_refused(index: VectorIndex, tmp_path: Path) -> None:
    path = tmp_path / "i"
    with pytest.raises(RetrievalError, match="cannot read the index"):
        load_index(path)
    index.save(path)
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], b"{}", b""):
        path.write_bytes(content)
        with pytest.raises(RetrievalError, match="damaged or no index"):
            load_index(path)


def test_the_empty_index_can_be_saved(index: VectorIndex, tmp_path: Path) -> None:
    empty = open_index(index.kind, 8, "cosine")
    empty.save(tmp_path / "i")
    loaded = load_index(tmp_path / "i")
    assert (len(loaded), loaded.metric) == (0, "cosine")
    loaded.add(["a"], KEYS[:1])
    assert loaded.search(KEYS[0], 1).ids == ("a",)


def test_options_survive(tmp_path: Path) -> None:
    made = open_index("faiss-hnsw", 8, "l2", links=5, ef_search=9)
    made.add(IDS, KEYS)
    made.save(tmp_path / "i")
    assert load_index(tmp_path / "i").options() == {"links": 5, "ef_construction": 200, "ef_search": 9}


@pytest.mark.parametrize("metric", ["l2", "cosine"])
def test_a_graph_skips_what_was_removed(metric: str, tmp_path: Path) -> None:
    keys = np.random.default_rng(0).standard_normal((2_000, 16)).astype(np.float32)
    queries, kept = np.random.default_rng(5).standard_normal((50, 16)), np.ones(2_000, bool)
    units = keys / np.linalg.norm(keys, axis=1, keepdims=True)
    index = open_index("faiss-hnsw", 16, metric)
    index.add(list(range(2_000)), keys)
    for query in queries[:12]:  # the neighbours of a query go: those that a search walks through
        gone = list(index.search(query, 45).ids)
        kept[gone] = False
        assert index.remove(gone) == len(gone)
    index.save(tmp_path / "i")
    for held in (index, load_index(tmp_path / "i")):
        for query in queries:
            scores = np.linalg.norm(keys - query, axis=1) if metric == "l2" else -units @ query
            true = [one for one in np.argsort(scores).tolist() if kept[one]][:10]
            found = held.search(query, 10).ids
            assert kept[list(found)].all()  # type: ignore[arg-type]
            assert len(set(found) & set(true)) >= 9
        removed = np.flatnonzero(kept)[:100].tolist()  # beyond 30 %: the graph is built anew
        assert held.remove(removed) == 100
        assert set(held.search(queries[0], 2_000).ids) == set(np.flatnonzero(kept)[100:].tolist())


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(ValueError, match="known: faiss-flat, faiss-hnsw"):
        open_index("annoy", 8)
    with pytest.raises(ValueError, match="known: cosine, ip, l2"):
        open_index("faiss-flat", 8, "hamming")
    with pytest.raises(ValueError, match="dim must be > 0"):
        open_index("faiss-flat", 0)
    with pytest.raises(TypeError, match="lnks"):
        open_index("faiss-hnsw", 8, lnks=4)
    with pytest.raises(ValueError, match="links must be > 0"):
        open_index("faiss-hnsw", 8, links=0)
