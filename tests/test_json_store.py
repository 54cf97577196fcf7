"""JSON on disk: kept over a restart, shared by processes, a miss where damaged."""

import os
import sqlite3
import stat
import subprocess
import sys

import pytest

from ragcachekit.json_store import JsonStore
from ragcachekit.retrieval.documents import DocumentIndex

VALUE = {"text": "Zürich 😀 \ud83d", "numbers": [1, 2.5, None], "long": "x" * 100_000}

CODE = """
import sys
from ragcachekit.json_store import JsonStore

with JsonStore(sys.argv[1]) as store:
    store.put({"b": store.get("a") + 1})
"""


def test_a_restart_keeps_values_and_their_order(tmp_path):
    with JsonStore(tmp_path / "store") as store:
        store.put({"b": VALUE, "a": [1], "c": "gone"})
        store.delete(["c", "never there"])
    with JsonStore(tmp_path / "store") as store:
        assert {key: store.get(key) for key in store.keys()} == {"b": VALUE, "a": [1]}  # noqa: SIM118
        assert store.keys() == ["b", "a"]


def test_texts_at_rest_are_for_this_user_alone_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        with DocumentIndex(path=tmp_path / "a" / "index") as index, JsonStore(tmp_path / "b" / "c") as store:
            index.add(["one"], [[1.0, 0.0]], ["a secret text"])
            store.put({"text": "a secret"})
            (tmp_path / "own").mkdir(mode=0o755)
            with JsonStore(tmp_path / "own") as kept:
                kept.put({"text": "a secret"})
            during = {path: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*")}
    finally:
        os.umask(before)
    found = during | {path: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*")}
    assert {path.name: oct(mode) for path, mode in found.items() if path.is_dir()} == {
        **dict.fromkeys(["a", "index", "documents", "b", "c"], oct(0o700)),
        "own": oct(0o755),  # whoever makes a folder decides
    }
    files = {path: mode for path, mode in found.items() if not path.is_dir()}
    assert {"cache.db", "cache.db-wal", "cache.db-shm", "lock"} <= {path.name for path in files}
    assert set(files.values()) == {0o600}


def test_another_process_sees_what_was_put(tmp_path):
    with JsonStore(tmp_path) as store:
        store.put({"a": 1})
        subprocess.run([sys.executable, "-c", CODE, str(tmp_path)], check=True)
        assert store.get("b") == 2


def test_an_altered_value_is_missing(tmp_path):
    with JsonStore(tmp_path) as store:
        store.put({"a": {"x": "aaaa"}, "b": 2, "long": "x" * 100_000})
    with sqlite3.connect(tmp_path / "cache.db") as database:
        database.execute("UPDATE entries SET value = replace(value, 'aaaa', 'aaab') WHERE key = '\"a\"'")
        database.execute("UPDATE entries SET value = substr(value, 1, 99999) WHERE key = '\"long\"'")
    with JsonStore(tmp_path) as store:
        assert [store.get(key) for key in ("a", "b", "long")] == [None, 2, None]


@pytest.mark.parametrize(
    "damage", [lambda data: data[:5000], lambda data: b"no database" * 1000, lambda _: b""]
)
def test_a_damaged_database_is_put_aside(tmp_path, damage):
    folder = tmp_path / "store"
    with JsonStore(folder) as store:
        store.put({str(i): i for i in range(1000)})
    database = folder / "cache.db"
    database.write_bytes(damage(database.read_bytes()))
    with JsonStore(folder) as store:
        assert all(store.get(str(i)) in (None, i) for i in range(1000))
        store.put({"new": 1})
        assert store.get("new") == 1


def test_a_failed_put_keeps_large_old_values(tmp_path):
    with JsonStore(tmp_path / "s") as store:
        store.put({"a": VALUE})
        with pytest.raises(TypeError):
            store.put({"a": "other" * 50_000, "b": object()})
        assert store.get("a") == VALUE
        assert len(store) == 1


def test_what_is_erased_is_in_no_file(tmp_path):
    store, secret = JsonStore(tmp_path), "the text that is forgotten"
    store.put({"kept": "other", "gone": secret})
    assert any(secret.encode() in file.read_bytes() for file in tmp_path.iterdir())
    store.erase(["gone"])
    assert not any(secret.encode() in file.read_bytes() for file in tmp_path.iterdir())
    assert store.get("kept") == "other"
    store.close()
