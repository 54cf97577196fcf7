"""Entries on disk: a restart answers the same, processes share them, and damage is a miss."""

from __future__ import annotations

import json
import logging
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from ragcachekit.json_store import JsonStore
from ragcachekit.retrieval.cached_retrieval import CachedRetrieval, Retrieved
from ragcachekit.retrieval.partition import Partition
from ragcachekit.retrieval.proximity import ProximityCache
from ragcachekit.retrieval.saved import SavedEntries, from_plain, to_plain
from stale_kit import change_and_ask

PLACE = Partition.of("acme", 2, filters={"lang": "en", "years": [2020, 2.5, None]}, index_id=b"v1")
QUESTION = "Which items are covered?"

PROGRAM = """
import sys
from ragcachekit.json_store import JsonStore
from ragcachekit.retrieval.partition import Partition
from ragcachekit.retrieval.proximity import ProximityCache
from ragcachekit.retrieval.cached_retrieval import CachedRetrieval
from ragcachekit.retrieval.saved import SavedEntries

filters = {"lang": "en", "years": [2020, 2.5, None]}
place = Partition.of("acme", 2, filters=filters, index_id=b"v1")
saved = SavedEntries(JsonStore(sys.argv[1]), str, str)
retrieval = CachedRetrieval(ProximityCache(10, 0.01, "l2"), text=str, saved=saved)
if sys.argv[2] == "insert":
    for i in range(12):
        found = [(i, f"text {i}"), ("x", "other")]
        retrieval.get([1.0, float(i)], place, lambda: found, question="Which items are covered?", k=2)
else:
    print(retrieval.invalidate(ids=[11]))
"""


def process(folder: Path, what: str) -> str:
    run = [sys.executable, "-c", PROGRAM, str(folder), what]
    return subprocess.run(run, check=True, capture_output=True, text=True, timeout=120).stdout


def opened(folder: Path, capacity: int = 10, poll: float = 0.0, **codec) -> CachedRetrieval[str]:
    codec = {"to_json": str, "from_json": str} | codec
    saved = SavedEntries[str](JsonStore(folder), poll_seconds=poll, **codec)
    return CachedRetrieval(ProximityCache(capacity, 0.01, "l2"), text=str, saved=saved)


def ask(retrieval: CachedRetrieval[str], at: float, place=PLACE, found=(), **more) -> Retrieved[str]:
    return retrieval.get([1.0, at], place, lambda: list(found), **more)


def test_another_process_answers_the_same_after_a_restart(tmp_path) -> None:
    process(tmp_path, "insert")
    retrieval = opened(tmp_path)
    assert retrieval.stats().entries == 10, "the first two were evicted, on disk too"
    for i in range(2, 12):
        answer = ask(retrieval, float(i), k=2, question=QUESTION)
        assert (answer.hit, answer.documents) == (True, (f"text {i}", "other"))
    assert ask(retrieval, 11.0, k=3).refused == "fewer results"
    assert ask(retrieval, 11.0001, question="Which items are not covered?").refused == "negation"
    retrieval.check()


def test_an_invalidation_reaches_a_running_process_and_the_disk(tmp_path) -> None:
    process(tmp_path, "insert")
    retrieval = opened(tmp_path)
    epoch = retrieval.epoch
    assert process(tmp_path, "invalidate") == "1\n"
    assert not ask(retrieval, 11.0).hit
    assert retrieval.epoch > epoch
    assert ask(retrieval, 9.0).hit
    assert retrieval.invalidate(texts=["text 9"]) == 1
    assert [ask(opened(tmp_path), at).hit for at in (8.0, 9.0, 11.0)] == [True, False, False]


def test_the_order_of_insertion_outlives_the_process(tmp_path) -> None:
    process(tmp_path, "insert")
    retrieval = opened(tmp_path, capacity=3)
    assert [ask(retrieval, at).hit for at in (8.0, 9.0, 10.0, 11.0)] == [False, True, True, True]


def test_inserts_of_others_are_seen_at_the_next_poll(tmp_path, monkeypatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    one, other = opened(tmp_path, poll=1.0), opened(tmp_path, poll=1.0)
    ask(one, 1.0, found=[("a", "a")])
    assert not ask(other, 1.0).hit
    now[0] = 1.5
    assert ask(other, 1.0).hit
    one.clear()
    assert ask(other, 1.0).hit, "not yet looked for"
    now[0] = 3.0
    assert not ask(other, 1.0).hit


def test_what_a_search_of_before_anothers_invalidation_found_is_not_inserted(tmp_path) -> None:
    one, other = opened(tmp_path, poll=1000.0), opened(tmp_path, poll=1000.0)
    asked, unsaved = one.lookup([1.0, 1.0], "p"), one.lookup([1.0, 2.0], ("p", sys))
    other.invalidate(ids=["a"])
    for lookup in (asked, unsaved):
        one.insert(lookup, [("a", "old")])
    assert one.stats().entries == opened(tmp_path).stats().entries == 0
    ask(one, 1.0, found=[("a", "new")])
    assert ask(opened(tmp_path), 1.0).documents == ("new",)


def test_entries_that_cannot_be_saved_stay_until_another_invalidates(tmp_path, caplog) -> None:
    one, other = opened(tmp_path), opened(tmp_path)
    for at in (1.0, 2.0):
        ask(one, at, place=("p", object()), found=[("a", "a")])
    place = ("p", object())
    ask(one, 3.0, place=place, found=[("b", "b")])
    assert ask(one, 3.0, place=place).hit
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "memory only" in caplog.text
    assert opened(tmp_path).stats().entries == 0
    other.invalidate(ids=["something else"])
    assert not ask(one, 3.0, place=place).hit


def test_a_codec_that_fails_costs_the_entry_alone(tmp_path) -> None:
    def broken(document: object) -> str:
        raise ValueError("no")

    assert ask(opened(tmp_path, to_json=broken), 1.0, found=[("a", "a")]).documents == ("a",)
    assert opened(tmp_path).stats().entries == 0
    ask(opened(tmp_path), 1.0, found=[("a", "a")])
    unable = opened(tmp_path, from_json=broken)
    assert unable.stats().entries == 0
    assert opened(tmp_path).stats().entries == 1, "left for those who can read it"
    unable.invalidate(ids=["b"])
    assert opened(tmp_path).stats().entries == 0, "nobody here knows whether it held b"


@pytest.mark.parametrize(
    "alter",
    [
        lambda value: value.replace("text 5", "text 6"),
        lambda value: value[:-1],
        lambda value: "",
        lambda value: b"\x80\x04K\x01.",
    ],
)
def test_altered_values_are_misses(tmp_path, alter) -> None:
    process(tmp_path, "insert")
    with sqlite3.connect(tmp_path / "cache.db") as database:
        (row,) = database.execute("SELECT rowid, value FROM Cache WHERE value LIKE '%text 5%'").fetchall()
        database.execute("UPDATE Cache SET value = ? WHERE rowid = ?", (alter(row[1]), row[0]))
    retrieval = opened(tmp_path)
    assert [ask(retrieval, at).hit for at in (4.0, 5.0, 6.0)] == [True, False, True]


@pytest.mark.parametrize(
    "change",
    [
        {"embedding": "%%%"},
        {"embedding": "AAAA"},
        {"embedding": ""},
        {"embedding": "AADAfwAAgD8="},  # NaN
        {"partition": {"tuple": [{"type": "os.system"}]}},
        {"partition": {"list": []}},
        {"partition": {"partition": [1]}},
        {"found": [[None, "a"]]},
        {"found": 3},
        {"question": 3},
        {"k": "two"},
        {"radius": "far"},
        {"at": None},
    ],
)
def test_values_of_another_form_are_misses(tmp_path, change) -> None:
    ask(opened(tmp_path), 1.0, place="p", found=[("a", "a")])
    with JsonStore(tmp_path) as store:
        ((key, value),) = [item for item in store.items() if item[0].startswith("entry:")]
        store.put({key: value | change, "entry:other": value | {"partition": "q"}})
    retrieval = opened(tmp_path)
    assert not ask(retrieval, 1.0, place="p").hit
    assert ask(retrieval, 1.0, place="q").hit
    retrieval.check()


def test_a_destroyed_database_is_an_empty_cache(tmp_path) -> None:
    process(tmp_path / "store", "insert")
    (tmp_path / "store" / "cache.db").write_bytes(b"nothing" * 1000)
    retrieval = opened(tmp_path / "store")
    assert retrieval.stats().entries == 0
    ask(retrieval, 1.0, found=[("a", "a")])
    assert ask(opened(tmp_path / "store"), 1.0).hit


def test_an_entry_is_not_older_than_its_time_to_live(tmp_path, monkeypatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "time", lambda: now[0])
    ask(opened(tmp_path), 1.0, found=[("a", "a")])
    cache = ProximityCache(10)
    cache.ttl = 60.0
    now[0] = 1050.0
    saved = SavedEntries[str](JsonStore(tmp_path), str, str)
    retrieval: CachedRetrieval[str] = CachedRetrieval(cache, saved=saved)
    assert ask(retrieval, 1.0).hit
    now[0] = 1061.0
    assert ask(retrieval, 1.0).refused == "expired"


def test_a_store_that_fails_costs_no_answer_but_an_invalidation_says_so(tmp_path, monkeypatch) -> None:
    retrieval = opened(tmp_path)
    ask(retrieval, 1.0, found=[("a", "a")])

    def full(*_: object, **__: object) -> bool:
        raise OSError("disk full")

    monkeypatch.setattr(JsonStore, "put", full)
    assert ask(retrieval, 2.0, found=[("b", "b")]).documents == ("b",)
    with pytest.raises(OSError, match="disk full"):
        retrieval.invalidate(ids=["a"])
    assert retrieval.stats().entries == 0


@pytest.mark.parametrize(
    "place",
    [
        PLACE,
        None,
        True,
        1,
        1.5,
        "text \ud83d",
        b"\x00",
        (),
        (1, (True, "a")),
        frozenset({1, "a"}),
        (str, type(None)),
    ],
)
def test_partitions_of_plain_values_come_back_equal_and_of_equal_types(place) -> None:
    again = from_plain(json.loads(json.dumps(to_plain(place))))
    assert again == place
    assert repr(sorted(map(repr, again)) if isinstance(again, frozenset) else again) == repr(
        sorted(map(repr, place)) if isinstance(place, frozenset) else place
    )


@pytest.mark.parametrize("place", [object(), (1, [2]), float("nan"), np.float32(1), Path, sys, lambda: 1])
def test_other_partitions_are_refused(place) -> None:
    with pytest.raises(TypeError, match="plain"):
        to_plain(place)


def test_processes_that_share_a_store_return_nothing_stale(tmp_path) -> None:
    saved = [SavedEntries[str](JsonStore(tmp_path), str, str, poll_seconds=0.0) for _ in range(3)]
    retrievals = [CachedRetrieval(ProximityCache(25, 0.0, "l2"), text=str, saved=one) for one in saved]
    hits, stale = change_and_ask(retrievals, seed=0, threads=3, operations=1500)
    assert stale == []
    assert hits > 50, "the caches were of use"
