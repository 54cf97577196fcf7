"""Staged searches: parts of a search whose last result is that of a whole one, also beside changes."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import faiss
import numpy as np
import pytest

from ragcachekit.errors import RetrievalError
from ragcachekit.retrieval.index import SearchResult, VectorIndex, index_names, open_index

OPTIONS: dict[str, dict[str, Any]] = {"faiss-ivf": {"lists": 8, "probes": 5}}
EXACT = ("brute", "faiss-flat")
METRICS = ("cosine", "l2", "ip")
DIM = 12


def rows(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, DIM)).astype(np.float32)


def distances(metric: str, query: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """In float64, and written otherwise than in the library."""
    q, x = query.astype(np.float64), keys.astype(np.float64)
    if metric == "l2":
        return np.linalg.norm(x - q, axis=1)
    dots = (x * q).sum(1)
    return -dots if metric == "ip" else 1 - dots / (np.linalg.norm(x, axis=1) * np.linalg.norm(q))


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("kind", index_names())
def test_the_last_stage_is_the_one_shot_result(kind: str, metric: str) -> None:
    index, keys = open_index(kind, DIM, metric, **OPTIONS.get(kind, {})), rows(1_500)
    keys[700:760] = keys[3]  # more equal ones than any k below
    index.add([f"d{i}" if i % 2 else i for i in range(1_500)], keys)
    earlier = 0
    for number, query in enumerate(np.concatenate([rows(40, 1), keys[:5]])):
        for k, stages in ((1, 2), (10, 4), (40, 7), (300, 3), (3, 1), (2_000, 5)):
            results = list(index.search_stages(query, k, stages))
            assert results[-1] == index.search(query, k), (number, k, stages)
            assert 1 <= len(results) <= stages
            earlier += len(results) - 1
            for result in results:
                assert list(result.scores) == sorted(result.scores)
                assert len(result.ids) == len(set(result.ids)) <= k
    assert earlier > 150


@pytest.mark.parametrize("kind", EXACT)
def test_ties_are_decided_by_id_alone(kind: str) -> None:
    index, keys = open_index(kind, DIM, "l2"), rows(600)
    keys[np.random.default_rng(2).permutation(600)[:400]] = keys[0]
    ids = np.random.default_rng(3).permutation(600).tolist()
    index.add(ids, keys)
    true = sorted(zip(distances("l2", keys[0], keys).tolist(), ids, strict=True))
    for k in (1, 5, 399, 401, 600):
        assert index.search(keys[0], k).ids == tuple(one for _, one in true[:k])
        assert [*index.search_stages(keys[0], k, 4)][-1].ids == tuple(one for _, one in true[:k])


def test_stages_go_through_parts() -> None:
    index = open_index("faiss-flat", DIM, "l2")
    index.add(list(range(400)), rows(400))
    seen = [set(result.ids) for result in index.search_stages(rows(1, 5)[0], 400, 4)]
    assert seen == [set(range(end)) for end in (100, 200, 300, 400)]


@pytest.mark.parametrize("kind", index_names())
def test_bad_arguments_are_refused_at_the_call(kind: str) -> None:
    index = open_index(kind, DIM, "l2")
    with pytest.raises(RetrievalError, match="index is empty"):
        index.search_stages(rows(1)[0], 3)
    index.add([1], rows(1))
    with pytest.raises(ValueError, match="stages must be > 0"):
        index.search_stages(rows(1)[0], 3, 0)
    with pytest.raises(ValueError, match="k must be > 0"):
        index.search_stages(rows(1)[0], 0)
    with pytest.raises(RetrievalError, match="one embedding"):
        index.search_stages(rows(1), 3)


@pytest.mark.parametrize("kind", index_names())
def test_changes_between_stages(kind: str) -> None:
    """Adds: the vectors at the beginning (scans) or the end (graphs). A removal ends it by a whole search."""
    index, query = open_index(kind, DIM, "l2", **OPTIONS.get(kind, {})), rows(1, 4)[0]
    index.add(list(range(500)), rows(500))
    before = index.search(query, 5)
    stages = index.search_stages(query, 5, 4)
    next(stages)
    around = rows(200, 6)  # nearer than all before, in all directions, and so in all lists
    around *= 0.95 * before.scores[0] / np.linalg.norm(around, axis=1, keepdims=True)
    new = list(range(1_000, 1_200))
    index.add(new, query + around)
    *_, last = stages
    assert last == (before if index.scans else index.search(query, 5))
    stages = index.search_stages(query, 5, 4)
    next(stages)
    index.remove([*new, before.ids[0]])
    assert [*stages] == [index.search(query, 5)]
    stages = index.search_stages(query, 600, 4)
    index.add(new, query + around)
    *_, last = stages
    if index.scans:
        assert not set(last.ids) & set(new)
    else:
        assert last == index.search(query, 600)
    index.remove(new)
    assert index.search(query, 4).ids == before.ids[1:]
    stages = index.search_stages(query, 5, 4)
    index.remove(list(range(500)))
    with pytest.raises(RetrievalError, match="index is empty"):
        next(stages)


class Change(NamedTuple):
    ids: list[int]
    vectors: np.ndarray | None  # None: removed


class Call(NamedTuple):
    query: np.ndarray
    k: int
    first: int
    results: list[SearchResult]
    last: int


def changes(vectors: np.ndarray) -> list[Change]:
    """Adds of 7, and after every fifth a removal of 10 of what is there."""
    generator, held, made = (
        np.random.default_rng(8),
        list(range(300)),
        [Change(list(range(300)), vectors[:300])],
    )
    for start in range(300, len(vectors) - 7, 7):
        ids = list(range(start, start + 7))
        made.append(Change(ids, vectors[ids]))
        held += ids
        if start % 5 == 0:
            gone = generator.choice(held, 10, replace=False).tolist()
            made.append(Change(gone, None))
            held = [one for one in held if one not in gone]
    return made


def apply(index: VectorIndex, change: Change) -> None:
    if change.vectors is None:
        index.remove(change.ids)
    else:
        index.add(change.ids, change.vectors)


def staged_beside(
    index: VectorIndex, made: list[Change], threads: int, queries: int
) -> tuple[list[Call], list[BaseException]]:
    """Staged searches in ``threads`` while the changes go on, spread over them; calls and errors."""
    calls: list[Call] = []
    errors: list[BaseException] = []
    apply(index, made[0])

    def search(seed: int) -> None:
        try:
            for number, query in enumerate(rows(queries, seed)):
                k, first = 1 + number % 12, index.version
                results = list(index.search_stages(query, k, 1 + number % 6))
                calls.append(Call(query, k, first, results, index.version))
        except BaseException as error:
            errors.append(error)

    running = [threading.Thread(target=search, args=(100 + seed,)) for seed in range(threads)]
    for thread in running:
        thread.start()
    for number, change in enumerate(made[1:], 1):
        while len(calls) * len(made) < number * threads * queries and any(t.is_alive() for t in running):
            threading.Event().wait(0.0002)
        apply(index, change)
    for thread in running:
        thread.join()
    return calls, errors


def check(kind: str, metric: str, made: list[Change], vectors: np.ndarray, calls: list[Call]) -> int:
    """Number of calls that match no version: replayed one-shot searches, and float64 distances."""
    replica, known = open_index(kind, DIM, metric, **OPTIONS.get(kind, {})), np.zeros(len(vectors), bool)
    open_calls, recall, matched = sorted(calls, key=lambda call: call.first), [], 0
    for version, change in enumerate(made, 1):
        apply(replica, change)
        known[change.ids] = change.vectors is not None
        held = np.flatnonzero(known)
        waiting = []
        for call in open_calls:
            if call.first > version or replica.search(call.query, call.k) != call.results[-1]:
                waiting += [call] if call.last > version else []
                continue
            true = distances(metric, call.query, vectors[held])
            order = np.lexsort((held, true))[: call.k]
            found = call.results[-1]
            scores = dict(zip(held.tolist(), true.tolist(), strict=True))
            assert [scores[one] for one in found.ids] == pytest.approx(found.scores, abs=1e-6)
            recall.append(len(set(found.ids) & set(held[order].tolist())) / call.k)
            if kind in EXACT:
                assert found.ids == tuple(held[order].tolist())
            matched += 1
        open_calls = waiting
    assert np.mean(recall) > 0.85
    return len(calls) - matched


def run(kind: str, metric: str, threads: int, queries: int, count: int) -> None:
    faiss.omp_set_num_threads(1)  # with more, Faiss's graph is another one each time
    vectors = rows(count)
    made = changes(vectors)
    index = open_index(kind, DIM, metric, **OPTIONS.get(kind, {}))
    calls, errors = staged_beside(index, made, threads, queries)
    assert errors == []
    assert len(calls) == threads * queries
    assert sum(call.first != call.last for call in calls) > len(calls) / 50, "too few changes beside searches"
    assert check(kind, metric, made, vectors, calls) == 0


@pytest.mark.parametrize("kind", index_names())
def test_staged_equals_one_shot_beside_changes(kind: str) -> None:
    run(kind, "cosine", 8, 40, 1_700)


@pytest.mark.soak
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("kind", index_names())
def test_2000_queries_in_each_of_8_threads(kind: str, metric: str) -> None:
    run(kind, metric, 8, 2_000, 6_000)
