"""Entries on disk: a restart answers the same, damage is a miss, and nothing that went comes back."""

from __future__ import annotations

import logging
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from ragcachekit.json_store import JsonStore
from ragcachekit.retrieval.cached_retrieval import CachedRetrieval, Retrieved, SavedEntries
from ragcachekit.retrieval.partition import KeyReader, Partition
from ragcachekit.retrieval.proximity import ProximityCache

PLACE = Partition("acme", 2, KeyReader().key({"lang": "en", "years": [2020, 2.5, {1, "b"}]}), None, "v1")
QUESTION = "Which items are covered?"

PROGRAM = """
import sys
from ragcachekit.json_store import JsonStore
from ragcachekit.retrieval.partition import KeyReader, Partition
from ragcachekit.retrieval.proximity import ProximityCache
from ragcachekit.retrieval.cached_retrieval import CachedRetrieval, SavedEntries

place = Partition("acme", 2, KeyReader().key({"lang": "en", "years": [2020, 2.5, {"b", 1}]}), None, "v1")
saved = SavedEntries(JsonStore(sys.argv[1]), str, str)
retrieval = CachedRetrieval(ProximityCache(10, 0.01, "l2"), text=str, saved=saved)
for i in range(12):
    found = [(i, f"text {i}"), ("x", "other")]
    retrieval.get([1.0, float(i)], place, lambda: found, question="Which items are covered?")
"""


def fill(folder: Path) -> None:
    subprocess.run([sys.executable, "-c", PROGRAM, str(folder)], check=True, timeout=120)


def opened(folder: Path, capacity: int = 10, ttl: float | None = None, **codec) -> CachedRetrieval[str]:
    saved = SavedEntries[str](JsonStore(folder), **({"to_json": str, "from_json": str} | codec))
    return CachedRetrieval(ProximityCache(capacity, 0.01, "l2"), text=str, ttl=ttl, saved=saved)


def ask(retrieval: CachedRetrieval[str], at: float, place=PLACE, found=(), **more) -> Retrieved[str]:
    return retrieval.get([1.0, at], place, lambda: list(found), **more)


def test_another_process_answers_the_same_after_a_restart(tmp_path) -> None:
    fill(tmp_path)
    retrieval = opened(tmp_path)
    assert retrieval.stats().entries == 10, "the first two were evicted, on disk too"
    for i in range(2, 12):
        answer = ask(retrieval, float(i), question=QUESTION)
        assert (answer.hit, answer.documents) == (True, (f"text {i}", "other"))
    assert ask(retrieval, 11.0001, question="Which items are not covered?").refused == "negation"
    assert [ask(opened(tmp_path, 3), at).hit for at in (8.0, 9.0, 10.0, 11.0)] == [False, True, True, True]


def test_what_was_invalidated_or_forgotten_does_not_come_back(tmp_path) -> None:
    fill(tmp_path)
    retrieval = opened(tmp_path)
    assert retrieval.invalidate(ids=[11]) == 1
    assert retrieval.forget_texts("acme", lambda text: text == "text 9") == 1
    assert [ask(opened(tmp_path), at).hit for at in (8.0, 9.0, 11.0)] == [True, False, False]


def test_the_latest_one_on_a_folder_keeps_its_entries_there(tmp_path) -> None:
    first = opened(tmp_path)
    ask(first, 1.0, found=[("a", "a")])
    second = opened(tmp_path)
    assert ask(second, 1.0).hit
    ask(first, 2.0, found=[("b", "b")])
    assert ask(first, 2.0).hit, "in memory"
    first.clear()
    assert [ask(opened(tmp_path), at).hit for at in (1.0, 2.0)] == [True, False]


def test_entries_that_cannot_be_saved_stay_in_memory(tmp_path, caplog) -> None:
    retrieval, place = opened(tmp_path), ("p", object())
    for at in (1.0, 2.0):
        ask(retrieval, at, place=place, found=[("a", "a")])
    assert ask(retrieval, 1.0, place=place).hit
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "memory only" in caplog.text
    assert opened(tmp_path).stats().entries == 0


def test_a_codec_that_fails_costs_the_entry_alone(tmp_path) -> None:
    def broken(document: object) -> str:
        raise ValueError("no")

    assert ask(opened(tmp_path, to_json=broken), 1.0, found=[("a", "a")]).documents == ("a",)
    assert opened(tmp_path).stats().entries == 0
    ask(opened(tmp_path), 1.0, found=[("a", "a")])
    unable = opened(tmp_path, from_json=broken)
    assert unable.stats().entries == 0
    unable.invalidate(ids=["b"])
    assert opened(tmp_path).stats().entries == 0, "nobody knew whether it held b"


@pytest.mark.parametrize(
    "alter",
    [lambda value: value.replace("text 5", "text 6"), lambda value: "", lambda value: b"\x80\x04K\x01."],
)
def test_altered_values_are_misses(tmp_path, alter) -> None:
    fill(tmp_path)
    with sqlite3.connect(tmp_path / "cache.db") as database:
        (row,) = database.execute("SELECT rowid, value FROM entries WHERE value LIKE '%text 5%'").fetchall()
        database.execute("UPDATE entries SET value = ? WHERE rowid = ?", (alter(row[1]), row[0]))
    retrieval = opened(tmp_path)
    assert [ask(retrieval, at).hit for at in (4.0, 5.0, 6.0)] == [True, False, True]


@pytest.mark.parametrize(
    "change",
    [
        {"embedding": "%%%"},
        {"embedding": "AAAA"},
        {"embedding": ""},
        {"embedding": "AADAfwAAgD8="},  # NaN
        {"partition": {"type": "os.system"}},
        {"partition": [1]},
        {"partition": ["p", 1, [], None, None]},
        {"found": [[None, "a"]]},
        {"found": 3},
        {"question": 3.5},
        {"at": None},
    ],
)
def test_values_of_another_form_are_misses(tmp_path, change) -> None:
    ask(opened(tmp_path), 1.0, place="p", found=[("a", "a")])
    with JsonStore(tmp_path) as store:
        ((key, value),) = [item for item in store.items() if item[0].startswith("entry:")]
        store.put({key: value | change, "entry:other": value | {"partition": "q"}})
    retrieval = opened(tmp_path)
    assert ask(retrieval, 1.0, place="q").hit
    if change != {"found": [[None, "a"]]}:  # harmless
        assert not ask(retrieval, 1.0, place="p").hit


def test_a_destroyed_database_is_an_empty_cache(tmp_path) -> None:
    fill(tmp_path / "store")
    (tmp_path / "store" / "cache.db").write_bytes(b"nothing" * 1000)
    retrieval = opened(tmp_path / "store")
    assert retrieval.stats().entries == 0
    ask(retrieval, 1.0, found=[("a", "a")])
    assert ask(opened(tmp_path / "store"), 1.0).hit


def test_an_entry_is_not_older_than_its_time_to_live(tmp_path, monkeypatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "time", lambda: now[0])
    ask(opened(tmp_path), 1.0, found=[("a", "a")])
    now[0] = 1050.0
    retrieval = opened(tmp_path, ttl=60.0)
    assert ask(retrieval, 1.0).hit
    now[0] = 1061.0
    assert ask(retrieval, 1.0).refused == "expired"
    assert opened(tmp_path).stats().entries == 0


def test_a_store_that_fails_costs_no_answer_but_an_invalidation_says_so(tmp_path, monkeypatch) -> None:
    retrieval = opened(tmp_path)
    ask(retrieval, 1.0, found=[("a", "a")])

    def full(*_: object, **__: object) -> bool:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(JsonStore, "put", full)
        assert ask(retrieval, 2.0, found=[("b", "b")]).documents == ("b",)
        with pytest.raises(OSError, match="disk full"):
            retrieval.invalidate(ids=["a"])
        assert retrieval.stats().entries == 0
    ask(retrieval, 3.0, found=[("c", "c")])
    assert [ask(opened(tmp_path), at).hit for at in (1.0, 3.0)] == [False, True], (
        "removed with the next change"
    )


@pytest.mark.parametrize("place", [PLACE, None, 1, "text \ud83d"])
def test_plain_partitions_are_found_again(tmp_path, place) -> None:
    ask(opened(tmp_path), 1.0, place=place, found=[("a", "a")])
    assert ask(opened(tmp_path), 1.0, place=place).hit


@pytest.mark.parametrize(
    "place", [object(), (1, 2), float("nan"), np.float32(1), Path, Partition("a", 1, object())]
)
def test_other_partitions_are_not(tmp_path, place) -> None:
    ask(opened(tmp_path), 1.0, place=place, found=[("a", "a")])
    assert opened(tmp_path).stats().entries == 0
