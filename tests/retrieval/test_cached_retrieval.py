"""Lookup, else search, then insert; entries go when documents change: nothing stale is returned."""

import threading
import time
from typing import Any

import pytest

from ragcachekit.retrieval.cached_retrieval import CachedRetrieval, Retrieved
from ragcachekit.retrieval.partition import Partition
from ragcachekit.retrieval.proximity import Entry, ProximityCache

A, NEAR_A, B = [1.0, 0.0], [1.0, 0.01], [0.0, 1.0]


class Search:
    """Answers with one list and counts."""

    def __init__(self, *found: tuple[str, str]) -> None:
        self.found, self.calls = list(found), 0

    def __call__(self) -> list[tuple[str, str]]:
        self.calls += 1
        return self.found


def make(capacity: int = 2, tolerance: float = 0.1, **options: Any) -> CachedRetrieval[str]:
    return CachedRetrieval(ProximityCache(capacity, tolerance), text=str, **options)


def test_partitions_share_no_document_under_one_id() -> None:
    retrieval = make()
    retrieval.get(A, "acme", Search(("1", "acme's")))
    assert retrieval.get(A, "other", Search(("1", "other's"))).documents == ("other's",)
    assert retrieval.get(A, "acme", Search()).documents == ("acme's",)
    assert retrieval.invalidate(where=lambda document: document == "acme's") == 1
    assert retrieval.get(A, "other", Search()).hit


def test_nothing_found_is_not_kept() -> None:
    retrieval, search = make(), Search()
    assert retrieval.get(A, "p", search).documents == ()
    assert retrieval.get(A, "p", search).documents == ()
    assert search.calls == 2


def test_a_bad_embedding_is_searched_noted_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    retrieval, search = make(), Search(("1", "one"))
    for _ in range(2):
        found = retrieval.get([float("nan"), 1.0], "p", search)
        assert (found.documents, found.hit) == (("one",), False)
        assert found.note is not None
        assert "NaN" in found.note
    assert search.calls == 2
    assert retrieval.get([0.0, 0.0], "p", search).documents == ("one",)
    assert retrieval.stats().entries == 0
    assert [record.message.count("NaN") for record in caplog.records] == [1, 0]


def test_texts_are_forgotten_in_their_namespace_alone() -> None:
    retrieval: CachedRetrieval[str] = CachedRetrieval(ProximityCache(9), text=str)
    one, other = Partition("one", 2), Partition("other", 2)
    for partition in (one, other):
        retrieval.get(A, partition, Search(("1", "kept"), ("2", "gone")))
        retrieval.get(B, partition, Search(("1", "kept")))
    assert retrieval.forget_texts("one", lambda text: text == "gone") == 1
    assert not retrieval.get(A, one, Search()).hit
    assert all(retrieval.get(v, p, Search()).hit for v, p in ((A, other), (B, one), (B, other)))
    assert retrieval.forget_texts("other") == 2
    assert retrieval.stats().entries == 1


def test_a_forget_waits_for_what_is_being_handed_on() -> None:
    retrieval: CachedRetrieval[str] = CachedRetrieval(ProximityCache(9), text=str)
    began, order = threading.Event(), list[str]()

    def hand_on() -> None:
        began.set()
        forgetting.join(0.2)  # it cannot end before this does
        order.append("handed on")

    def forget() -> None:
        began.wait(10)
        retrieval.forget_texts("one")
        order.append("forgotten")

    forgetting = threading.Thread(target=forget)
    forgetting.start()
    assert retrieval.while_current(retrieval.epoch, hand_on)
    forgetting.join(10)
    assert order == ["handed on", "forgotten"]


def searched(retrieval: CachedRetrieval[str], embedding, documents, **options) -> Retrieved[str]:
    return retrieval.get(embedding, "p", lambda: [(one, one) for one in documents], **options)


def test_a_near_miss_is_searched() -> None:
    retrieval = make(9)
    searched(retrieval, A, "a", question="Which items are covered?")
    asked = searched(retrieval, NEAR_A, "b", question="Which items are not covered?")
    assert (asked.hit, asked.refused, asked.documents) == (False, "negation", ("b",))
    assert searched(retrieval, A, "", question="Which items are covered?").documents == ("a",)
    assert searched(retrieval, NEAR_A, "", question="Which items are not covered?").documents == ("b",)
    assert searched(retrieval, A, "").documents == ("a",), "without a text nothing is compared"


def test_the_guard_can_be_turned_off_and_does_not_run_at_tolerance_0() -> None:
    for retrieval in (make(9, guard=False), make(9, 0.0)):
        searched(retrieval, A, "a", question="Which items are covered?")
        assert searched(retrieval, A, "b", question="Which items are not covered?").hit


def test_bad_arguments_of_invalidate() -> None:
    with pytest.raises(TypeError, match="put it into a list"):
        make().invalidate(ids="document")
    with pytest.raises(TypeError, match="text="):
        CachedRetrieval[str](ProximityCache(1)).invalidate(texts=["a"])

    def broken(document: str) -> bool:
        raise KeyError(document)

    retrieval = make(9)
    searched(retrieval, A, "a")
    with pytest.raises(KeyError):
        retrieval.invalidate(where=broken)


def test_an_expired_result_is_searched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "time", lambda: now[0])
    retrieval = make(9, ttl=10.0)
    searched(retrieval, A, "a")
    searched(retrieval, B, "b")
    now[0] += 6
    assert searched(retrieval, NEAR_A, "").hit, "which does not prolong it"
    now[0] += 4
    again = searched(retrieval, NEAR_A, "c")
    assert (again.hit, again.refused, again.documents) == (False, "expired", ("c",))
    assert retrieval.stats().entries == 1, "all that has expired goes"
    assert searched(retrieval, A, "").documents == ("c",)
    for ttl in (0.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="ttl must be"):
            make(ttl=ttl)
        with pytest.raises(ValueError, match="max_idle must be"):
            make(max_idle=ttl)


class Broken(ProximityCache):
    """A query cache on a failing medium."""

    def lookup(self, *_: object, **__: object) -> None:  # type: ignore[override]
        raise OSError("gone")

    def insert(self, *_: object, **__: object) -> tuple[Entry, ...]:
        raise OSError("gone")


def test_a_failing_cache_still_answers(caplog: pytest.LogCaptureFixture) -> None:
    retrieval: CachedRetrieval[str] = CachedRetrieval(Broken(1))
    assert retrieval.get(A, "p", Search(("1", "one"))).documents == ("one",)
    assert "query cache failed" in caplog.text
