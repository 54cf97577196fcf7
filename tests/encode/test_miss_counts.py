"""Counts of misses: which miss is the one that pays, how many are remembered, and what forget drops."""

import pytest

from ragcachekit.encode import background
from ragcachekit.encode.background import MissCounts
from ragcachekit.model.encoding import Encoding, InPromptEncoding
from ragcachekit.plan.link_plan import Missing
from store_kit import key_of


def item(number, encoding=None, **changes):
    return Missing(key_of(number, **changes), (number,), encoding or Encoding("standalone"))


def held(counts):
    return {name: list(entries) for name, entries in counts._namespaces.items()}


@pytest.mark.parametrize("after", [1, 2, 4])
def test_every_nth_miss_is_due(after):
    counts = MissCounts()
    due = [counts.is_due(item(0), after) for _ in range(3 * after)]
    assert due == [number % after == after - 1 for number in range(3 * after)]
    assert held(counts) == {}


def test_other_contexts_are_other_entries_but_of_in_prompt_chunks():
    for encoding, due in ((Encoding("system", (1,)), False), (InPromptEncoding("in-prompt", (1,)), True)):
        counts = MissCounts()
        assert not counts.is_due(item(0, encoding, context=("a",)), 2)
        assert counts.is_due(item(0, encoding, context=("b",)), 2) is due


def test_a_busy_namespace_pushes_out_its_own_oldest(monkeypatch):
    monkeypatch.setattr(background, "MAX_COUNTED", 3)
    counts = MissCounts()
    counts.is_due(item(0, namespace="quiet"), 2)
    for number in range(4):
        counts.is_due(item(number), 2)
    assert held(counts) == {
        "quiet": [key_of(0, namespace="quiet")],
        key_of(0).namespace: [key_of(2), key_of(3)],
    }
    assert counts.is_due(item(0, namespace="quiet"), 2)


def test_many_namespaces_leave_nothing_behind(monkeypatch):
    monkeypatch.setattr(background, "MAX_COUNTED", 3)
    counts = MissCounts()
    for number in range(10):
        counts.is_due(item(0, namespace=str(number)), 2)
    assert len(held(counts)) == 3


def test_forget_drops_a_chunk_and_what_stands_behind_it():
    counts = MissCounts()
    items = [item(0), item(1, context=("chunk-0",)), item(2), item(0, namespace="other")]
    for one in items:
        counts.is_due(one, 2)
    counts.forget(key_of(0).namespace, frozenset(["chunk-0"]))
    assert [counts.is_due(one, 2) for one in items] == [False, False, True, True]
    counts.forget(key_of(0).namespace, None)
    assert held(counts) == {}
