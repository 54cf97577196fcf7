"""Entries go when documents change: nothing stale is returned, with threads, against an independent model."""

from __future__ import annotations

import numpy as np
import pytest

from ragcachekit.retrieval.cached_retrieval import CachedRetrieval, Retrieved
from ragcachekit.retrieval.partition import Partition
from ragcachekit.retrieval.proximity import ProximityCache
from stale_kit import change_and_ask

A, NEAR_A, B = [1.0, 0.0], [1.0, 0.01], [0.0, 1.0]


def make(tolerance: float = 0.1, metric: str = "cosine", **options: object) -> CachedRetrieval[str]:
    return CachedRetrieval(ProximityCache(20, tolerance, metric), text=str, **options)  # type: ignore[arg-type]


def searched(retrieval: CachedRetrieval[str], embedding, documents, **options) -> Retrieved[str]:
    return retrieval.get(embedding, "p", lambda: [(one, one) for one in documents], **options)


def test_a_larger_k_is_cut_and_a_smaller_one_is_replaced() -> None:
    retrieval = make()
    searched(retrieval, A, "abc", k=3)
    assert searched(retrieval, NEAR_A, "", k=2).documents == ("a", "b")
    missed = searched(retrieval, NEAR_A, "abcde", k=5)
    assert (missed.hit, missed.refused, missed.documents) == (False, "fewer results", tuple("abcde"))
    assert retrieval.stats().entries == 1
    assert searched(retrieval, A, "", k=5).documents == tuple("abcde")
    assert searched(retrieval, A, "", k=3).documents == tuple("abc")
    retrieval.check()


def test_an_index_that_has_fewer_answers_for_the_k_it_was_asked() -> None:
    retrieval = make()
    searched(retrieval, A, "ab", k=5)
    assert searched(retrieval, A, "", k=5).documents == ("a", "b")
    assert not searched(retrieval, A, "ab", k=6).hit


def test_a_near_miss_is_searched() -> None:
    retrieval = make()
    searched(retrieval, A, "a", question="Which items are covered?")
    asked = searched(retrieval, NEAR_A, "b", question="Which items are not covered?")
    assert (asked.hit, asked.refused, asked.documents) == (False, "negation", ("b",))
    assert searched(retrieval, A, "", question="Which items are covered?").documents == ("a",)
    assert searched(retrieval, NEAR_A, "", question="Which items are not covered?").documents == ("b",)
    assert searched(retrieval, A, "").documents == ("a",), "without a text nothing is compared"


def test_the_guard_can_be_turned_off_and_does_not_run_at_tolerance_0() -> None:
    for retrieval in (make(guard=False), make(tolerance=0.0)):
        searched(retrieval, A, "a", question="Which items are covered?")
        assert searched(retrieval, A, "b", question="Which items are not covered?").hit


def test_invalidate_drops_what_holds_a_document() -> None:
    retrieval = make(0.0)
    for embedding, documents in ((A, "ab"), (B, "bc"), ([1.0, 1.0], "cd"), ([2.0, 1.0], "de")):
        searched(retrieval, embedding, documents)
    assert retrieval.invalidate(ids=["a"]) == 1
    assert retrieval.invalidate(texts=["b"], where=lambda document: document == "e") == 2
    assert retrieval.invalidate(ids=[]) == 0
    assert retrieval.invalidate(partition=lambda place: place == "q") == 0
    assert retrieval.invalidate(ids=["d"], partition=lambda place: place == "p") == 1
    assert retrieval.stats().entries == 0
    retrieval.check()


def test_bad_arguments_of_invalidate() -> None:
    with pytest.raises(TypeError, match="put it into a list"):
        make().invalidate(ids="document")
    with pytest.raises(TypeError, match="text="):
        CachedRetrieval[str](ProximityCache(1)).invalidate(texts=["a"])

    def broken(document: str) -> bool:
        raise KeyError(document)

    retrieval = make()
    searched(retrieval, A, "a")
    with pytest.raises(KeyError):
        retrieval.invalidate(where=broken)
    retrieval.check()


@pytest.mark.parametrize(
    ("metric", "radius", "inside", "outside"),
    [
        ("l2", 0.5, [1.0, 0.49], [1.0, 0.51]),
        ("cosine", 0.1, [0.92, np.sqrt(1 - 0.92**2)], [0.88, np.sqrt(1 - 0.88**2)]),
        ("ip", -0.5, [0.51, 3.0], [0.49, 3.0]),
    ],
)
def test_a_new_document_within_the_radius_drops_the_entry(metric, radius, inside, outside) -> None:
    for added, gone in ((inside, 1), (outside, 0), ([outside, inside], 1)):
        retrieval = make(0.0, metric)
        retrieval.insert(retrieval.lookup(A, "p", k=1), [("a", "a")], radius)
        assert retrieval.invalidate_near(added) == gone


def test_entries_without_a_radius_or_with_room_go_on_any_addition() -> None:
    retrieval = make(0.0)
    retrieval.insert(retrieval.lookup(A, "p", k=1), [("a", "a")])
    retrieval.insert(retrieval.lookup(B, "p", k=2), [("a", "a")], 0.1)
    retrieval.insert(retrieval.lookup([1.0, 1.0], "p", k=1), [("a", "a")], 0.1)
    assert retrieval.invalidate_near([[-1.0, -1.0]]) == 2
    assert retrieval.invalidate_near([[-1.0, -1.0, 0.0]]) == 1, "of another width"
    searched(retrieval, A, "a")
    assert retrieval.invalidate_near([float("nan"), 1.0]) == 1
    retrieval.check()


def test_a_search_that_began_before_an_addition_is_not_inserted() -> None:
    retrieval = make()
    asked = retrieval.lookup(A, "p")
    retrieval.invalidate_near(B)
    retrieval.insert(asked, [("a", "a")])
    assert retrieval.stats().entries == 0


def test_a_question_of_another_namespace_keeps_its_entry() -> None:
    retrieval = make()
    for namespace in ("one", "two"):
        retrieval.get(A, Partition.of(namespace, 1), lambda: [("a", "a")])
    assert retrieval.invalidate(ids=["a"], partition=lambda place: place.namespace == "one") == 1
    assert retrieval.get(A, Partition.of("two", 1), lambda: []).hit


@pytest.mark.parametrize("seed", [0, 1])
def test_ten_thousand_operations_with_threads_return_nothing_stale(seed: int) -> None:
    retrieval: CachedRetrieval[str] = CachedRetrieval(ProximityCache(25, 0.0, "l2"), text=str)
    hits, stale = change_and_ask([retrieval], seed, threads=4, operations=10_000)
    assert stale == []
    assert hits > 500, "the cache was of use"
    retrieval.check()
