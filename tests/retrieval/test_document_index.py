"""Documents by id: what is found, replaced, deleted and refused, in memory and on disk."""

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ragcachekit.errors import Closed, RetrievalError
from ragcachekit.retrieval.documents import DocumentIndex

Make = Callable[..., DocumentIndex]


def rows(count: int, dim: int = 8, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, dim)).astype(np.float32)


@pytest.fixture(params=["memory", "disk"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    path = tmp_path / "index" if request.param == "disk" else None

    def build(index: str = "faiss-flat", metric: str = "l2", **options: Any) -> DocumentIndex:
        return DocumentIndex(index, metric, path, **options)

    return build


def filled(make: Make, count: int = 20) -> DocumentIndex:
    index = make()
    metadatas = [{"page": i, "even": i % 2 == 0, "tags": [i, None, {"deep": 1.5}]} for i in range(count)]
    index.add([f"d{i}" for i in range(count)], rows(count), [f"text {i} é" for i in range(count)], metadatas)
    return index


def test_search_returns_documents_nearest_first(make: Make) -> None:
    keys, query = rows(20), rows(1, seed=1)[0]
    with filled(make) as index:
        hits = index.search(query, 5)
        distances = np.linalg.norm(keys.astype(np.float64) - query, axis=1)
        order = np.argsort(distances)[:5].tolist()
        assert [hit.record.id for hit in hits] == [f"d{i}" for i in order]
        assert [hit.score for hit in hits] == pytest.approx(distances[order].tolist())
        assert hits[0].record.text == f"text {order[0]} é"
        assert hits[0].record.metadata["tags"] == [order[0], None, {"deep": 1.5}]
        assert len(index.search(query, 100)) == len(index) == 20
        assert (index.metric, index.version) == ("l2", 1)


def test_an_empty_index_finds_nothing(make: Make) -> None:
    with make() as index:
        assert index.search([1.0, 2.0], 3) == []
        assert (len(index), index.version, index.ids, index.get(["a"])) == (0, 0, (), [])
        assert index.delete(["a"]) == 0
        index.add([], [], [])
        assert index.version == 0
        index.add(["a"], [[1.0, 2.0]], ["x"])
        assert index.delete(["a"]) == 1
        assert index.search([1.0, 2.0], 3) == []


def test_replace_delete_and_get(make: Make) -> None:
    with filled(make) as index:
        with pytest.raises(ValueError, match="'d3' is in the index already; replace=True"):
            index.add(["new", "d3"], rows(2), ["a", "b"])
        assert index.version == 1
        index.add(["new", "d3"], rows(2) + 50, ["a", "b"], [{"x": 1}, {}], replace=True)
        assert [hit.record.text for hit in index.search(rows(1)[0] + 50, 2)] == ["a", "b"]
        assert [r.text for r in index.get(["d3", "gone", "d0"])] == ["b", "text 0 é"]
        assert index.get(["d3"])[0].metadata == {}
        assert index.delete(["d3", "d4", "unknown", "d3"]) == 2
        assert index.version == 3
        assert index.get(["d3", "d4"]) == []
        assert "d3" not in index
        assert "d5" in index
        assert len(index) == 19
        assert {"d3", "d4"}.isdisjoint(hit.record.id for hit in index.search(rows(1)[0], 30))
        assert np.array_equal(index.vectors(["d5", "d0"]), rows(20)[[5, 0]])
        with pytest.raises(RetrievalError, match="'d3' is not in the index"):
            index.vectors(["d3"])


def test_ids_of_both_types_are_told_apart(make: Make) -> None:
    with make() as index:
        index.add([1, "1", -3], rows(3), ["int", "str", "minus"])
        assert [r.text for r in index.get(["1", 1, -3])] == ["str", "int", "minus"]
        assert index.ids == (1, "1", -3)


def test_filters_go_on_until_k_are_found(make: Make) -> None:
    query = rows(1, seed=3)[0]
    with make() as index:
        index.add(
            list(range(300)), rows(300), ["t"] * 300, [{"n": i, "rare": i % 100 == 7} for i in range(300)]
        )
        everything = [hit.record.id for hit in index.search(query, 300)]
        rare = [one for one in everything if one in (7, 107, 207)]
        assert [hit.record.id for hit in index.search(query, 2, {"rare": True})] == rare[:2]
        assert [hit.record.id for hit in index.search(query, 9, {"rare": True})] == rare
        assert [hit.record.id for hit in index.search(query, 1, {"rare": True, "n": 107})] == [107]
        assert index.search(query, 1, {"unknown": None}) == []
        small = index.search(query, 4, lambda record: record.metadata["n"] < 50)
        assert [hit.record.id for hit in small] == [i for i in everything if int(i) < 50][:4]
        with pytest.raises(TypeError, match="mapping or a callable"):
            index.search(query, 1, "rare")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("metadata", "error", "match"),
    [
        ({"a": {"b": {1, 2}}}, TypeError, "type set is not"),
        ({"a": [1, float("nan")]}, ValueError, "not JSON compliant"),
        ({"a": float("inf")}, ValueError, "not JSON compliant"),
        ({1: 2}, TypeError, "must hold JSON values"),
        ({"a": (1,)}, TypeError, "must hold JSON values"),
        ({"a": b"raw"}, TypeError, "type bytes is not"),
        ("text", ValueError, "cannot be stored"),
    ],
)
def test_only_json_values(make: Make, metadata: Any, error: type[Exception], match: str) -> None:
    with filled(make) as index:
        with pytest.raises(error, match=match):
            index.add(["x"], rows(1), ["t"], [metadata])
        assert (len(index), index.version) == (20, 1)


@pytest.mark.parametrize(
    ("ids", "embeddings", "texts", "error", "match"),
    [
        (["a"], rows(1), [], ValueError, "as many texts"),
        (["a"], rows(2), ["t"], ValueError, "1 ids for 2"),
        (["a", "a"], rows(2), ["t", "u"], ValueError, "twice"),
        (["a"], rows(1), [3], TypeError, "must be a str"),
        (["a"], rows(1), "t", TypeError, "one string"),
        (["a"], rows(1, 9), ["t"], RetrievalError, "width 8, not 9"),
        (["a"], rows(1) * np.nan, ["t"], RetrievalError, "NaN"),
        (["a"], rows(1)[0], ["t"], RetrievalError, "shape"),
        ([1.5], rows(1), ["t"], TypeError, "str or int"),
    ],
)
def test_a_refused_add_changes_nothing(
    make: Make, ids: Any, embeddings: Any, texts: Any, error: type[Exception], match: str
) -> None:
    with filled(make) as index:
        with pytest.raises(error, match=match):
            index.add(ids, embeddings, texts)
        assert (len(index), index.version) == (20, 1)


def test_what_was_given_and_what_is_returned_are_copies(make: Make) -> None:
    metadata = {"list": [1]}
    with make() as index:
        index.add(["a"], rows(1), ["t"], [metadata])
        metadata["list"].append(2)
        index.get(["a"])[0].metadata["list"].append(3)
        assert index.get(["a"])[0].metadata == {"list": [1]}


def test_after_close(make: Make) -> None:
    index = filled(make)
    index.close()
    index.close()
    with pytest.raises(Closed, match="open it again"):
        index.search(rows(1)[0], 1)


def test_random_operations_beside_searches(make: Make) -> None:
    """Against a dict; each hit must be a document as it was at some time, with that document's distance."""
    generator, vectors, held, texts = random.Random(1), rows(2_000, seed=4), {}, {}
    failures: list[object] = []
    done = threading.Event()
    with make() as index:

        def search(seed: int) -> None:
            queries = rows(50, seed=seed).astype(np.float64)
            while not done.is_set():
                for query in queries:
                    for record, score in index.search(query, 5):
                        true = np.linalg.norm(vectors[int(record.text)] - query)
                        if texts[int(record.text)] != record.id or abs(true - score) > 1e-5:
                            failures.append((record, score))

        threads = [threading.Thread(target=search, args=(seed,)) for seed in (11, 12, 13)]
        for thread in threads:
            thread.start()
        for step in range(400):
            chosen = generator.sample(range(100), 3)
            if generator.random() < 0.4:
                assert index.delete(chosen) == sum(held.pop(one, None) is not None for one in chosen)
            else:
                numbers = range(3 * step, 3 * step + 3)
                held |= dict(zip(chosen, numbers, strict=True))
                texts |= dict(zip(numbers, chosen, strict=True))
                index.add(chosen, vectors[list(numbers)], [str(n) for n in numbers], replace=True)
            assert len(index) == len(held)
        done.set()
        for thread in threads:
            thread.join()
        assert failures == []
        assert {r.id: int(r.text) for r in index.get(range(100))} == held  # type: ignore[arg-type]
        found = {hit.record.id: int(hit.record.text) for hit in index.search(vectors[0], 200)}
        assert found == held


def test_a_change_ends_the_stages_by_a_whole_search(make: Make) -> None:
    query = rows(1, seed=2)[0]
    with filled(make) as index:
        stages = index.search_stages(query, 3)
        next(stages)
        index.add(["near"], query[None], ["n"])
        assert [*stages] == [index.search(query, 3)]
        stages = index.search_stages(query, 3)
        index.delete(index.ids)
        assert [*stages] == [[]]


@pytest.mark.parametrize(("where", "k"), [({"even": True}, 3), (lambda record: record.id == "d7", 2)])
def test_stages_show_only_what_the_filter_accepts(make: Make, where: Any, k: int) -> None:
    query = rows(1, seed=2)[0]
    with filled(make) as index:
        *earlier, last = index.search_stages(query, k, 4, where)
        assert last == index.search(query, k, where)
        accepted = {hit.record.id for hit in index.search(query, 20, where)}
        assert any(earlier)
        assert {hit.record.id for hits in earlier for hit in hits} <= accepted
