"""Staged searches: parts of a search whose last result is that of a whole one, also beside changes."""

import threading
from itertools import product

import numpy as np
import pytest

from benchmarks.ivf_index import FaissIvfIndex
from ragcachekit.retrieval.index import SearchResult, VectorIndex, index_names, open_index
from soak_kit import soaked

DIM = 12
KINDS = (*index_names(), "faiss-ivf")
METRICS = ("cosine", "l2", "ip")


def opened(kind: str, metric: str = "l2") -> VectorIndex:
    if kind == "faiss-ivf":
        return FaissIvfIndex(DIM, metric, lists=8, probes=5)
    return open_index(kind, DIM, metric)


def rows(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, DIM)).astype(np.float32)


@pytest.mark.parametrize(
    ("kind", "metric"),
    soaked(product(KINDS, METRICS), *zip(KINDS, METRICS, strict=True), *product(KINDS[:1], METRICS)),
)
def test_the_last_stage_is_the_one_shot_result(kind: str, metric: str) -> None:
    index, keys = opened(kind, metric), rows(1_500)
    keys[700:706] = keys[3]
    index.add([f"d{i}" if i % 2 else i for i in range(1_500)], keys)
    earlier = 0
    for number, query in enumerate(np.concatenate([rows(20, 1), keys[:5]])):
        for k, stages in ((1, 2), (10, 4), (40, 7), (300, 3), (3, 1), (2_000, 5)):
            results = list(index.search_stages(query, k, stages))
            assert results[-1] == index.search(query, k), (number, k, stages)
            assert 1 <= len(results) <= stages
            earlier += len(results) - 1
            for result in results:
                assert list(result.scores) == sorted(result.scores)
                assert len(result.ids) == len(set(result.ids)) <= k
    assert earlier > 60


def test_stages_go_through_parts() -> None:
    index = opened("faiss-flat")
    index.add(list(range(400)), rows(400))
    seen = [set(result.ids) for result in index.search_stages(rows(1, 5)[0], 400, 4)]
    assert seen == [set(range(end)) for end in (100, 200, 300, 400)]


@pytest.mark.parametrize("kind", index_names())
def test_stages_beside_changes_end_as_a_search_of_some_moment(kind: str) -> None:
    """Every last result is what an index of one of the versions during the call finds."""
    vectors, index = rows(900), opened(kind, "cosine")
    made = [(list(range(300)), True)]
    for start in range(300, 893, 7):
        made += [(list(range(start, start + 7)), True), ([start - 300, start - 299], False)]
    calls: list[tuple[np.ndarray, int, SearchResult, int]] = []
    done = threading.Event()

    def apply(to: VectorIndex, ids: list[int], comes: bool) -> None:
        to.add(ids, vectors[ids]) if comes else to.remove(ids)

    def search(seed: int) -> None:
        queries = rows(40, seed)
        while not done.is_set():
            for query in queries:
                first = index.version
                *_, last = index.search_stages(query, 5, 4)
                calls.append((query, first, last, index.version))

    apply(index, *made[0])
    threads = [threading.Thread(target=search, args=(seed,)) for seed in (11, 12, 13)]
    for thread in threads:
        thread.start()
    for change in made[1:]:
        seen = len(calls)
        while len(calls) < seen + 2:
            done.wait(0.0005)
        apply(index, *change)
    done.set()
    for thread in threads:
        thread.join()
    replica, left = opened(kind, "cosine"), calls
    assert sum(first != last for _, first, _, last in calls) > 20, "too few changes beside searches"
    for version, change in enumerate(made, 1):
        apply(replica, *change)
        left = [
            call
            for call in left
            if not (call[1] <= version <= call[3] and replica.search(call[0], 5) == call[2])
        ]
    assert left == []
