"""The disk tier: damaged, renamed and missing files; an index that is lost, damaged or lies."""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from store_kit import (
    agrees_with_files,
    entry_size,
    file_of,
    filled,
    holds,
    key_of,
    kv_of,
    opened,
)

from ragcachekit.store.index import JsonDisk


@pytest.mark.parametrize("where", [0, 3, 60, 300, -1])
def test_a_flipped_byte_is_a_counted_miss_and_the_file_goes(tmp_path: Path, where: int) -> None:
    path = tmp_path / "kv"
    filled(path)
    data = bytearray(file_of(path, key_of(1)).read_bytes())
    data[where] ^= 4
    store = opened(path)
    file_of(path, key_of(1)).write_bytes(bytes(data))
    assert [holds(store, n) for n in range(4)] == [True, False, True, True]
    assert store.stats()[0].damaged == 1
    assert not file_of(path, key_of(1)).exists()
    assert agrees_with_files(store, path)
    assert store.put(key_of(1), kv_of(1))
    assert holds(store, 1)
    store.close()


def test_damage_while_closed_is_found_at_start_or_at_the_read(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    filled(path)
    with file_of(path, key_of(0)).open("r+b") as file:
        file.truncate(100)
    with file_of(path, key_of(2)).open("r+b") as file:
        file.seek(-5, os.SEEK_END)
        file.write(b"xxxxx")
    store = opened(path)
    assert store.stats()[0].damaged == 1
    assert [holds(store, n) for n in range(4)] == [False, True, False, True]
    assert store.stats()[0].damaged == 2
    assert agrees_with_files(store, path)
    store.close()


def test_a_file_renamed_to_another_key_is_a_miss(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    filled(path, entries=2)
    theirs = key_of(1, namespace="globex/docs")
    store = opened(path)
    file_of(path, key_of(1)).rename(file_of(path, theirs))
    assert store.get(theirs) is None
    assert store.get(key_of(1)) is None
    assert store.stats()[0].damaged == 1
    assert agrees_with_files(store, path)
    store.close()


def test_a_file_deleted_by_hand_is_a_miss_and_leaves_the_index(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    filled(path)
    store = opened(path)
    file_of(path, key_of(1)).unlink()
    assert not holds(store, 1)
    assert store.stats()[0].damaged == 0
    assert agrees_with_files(store, path)
    store.close()


def delete_all(index: Path) -> None:
    for file in index.iterdir():
        file.unlink()
    index.rmdir()


def overwrite(index: Path) -> None:
    (index / "cache.db").write_bytes(b"this is no database" * 500)


def cut_short(index: Path) -> None:
    with (index / "cache.db").open("r+b") as file:
        file.truncate(5000)


def execute(*statements: str) -> Callable[[Path], None]:
    def run(index: Path) -> None:
        connection = sqlite3.connect(index / "cache.db")
        with connection:
            for statement in statements:
                connection.execute(statement)
        connection.close()

    return run


INDEX_DAMAGE: dict[str, Callable[[Path], None]] = {
    "deleted": delete_all,
    "overwritten": overwrite,
    "cut short": cut_short,
    "row lost": execute("DELETE FROM Cache WHERE rowid = 2"),
    "row too many": execute(
        "INSERT INTO Cache(key, raw, mode, size, value) VALUES ('ff', 1, 1, 9, '{\"nbytes\": 9}')"
    ),
    "wrong size": execute("UPDATE Cache SET value = '{\"nbytes\": 1}' WHERE rowid = 1"),
    "wrong size column": execute("UPDATE Cache SET size = 1 WHERE rowid = 1"),
    "not JSON": execute("UPDATE Cache SET value = 'nonsense'"),
    "wrong JSON": execute("UPDATE Cache SET value = '[]'"),
    "a pickle": execute("UPDATE Cache SET mode = 4, value = x'80034b012e' WHERE rowid = 3"),
    "a pickled key": execute("UPDATE Cache SET raw = 0, key = x'80034b012e' WHERE rowid = 3"),
    "wrong sum": execute("UPDATE Settings SET value = 1 WHERE key = 'size'"),
    "sum lost": execute("UPDATE Settings SET value = 'none' WHERE key = 'size'"),
    "foreign setting": execute("UPDATE Settings SET key = 'disk_size' WHERE key = 'size'"),
    "table lost": execute("DROP TABLE Cache"),
}


@pytest.mark.parametrize("damage", INDEX_DAMAGE.values(), ids=INDEX_DAMAGE)
def test_a_damaged_index_is_rebuilt_from_the_files(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    path = tmp_path / "kv"
    filled(path)
    damage(path / "index")
    store = opened(path)
    assert [holds(store, n) for n in range(4)] == [True] * 4
    assert agrees_with_files(store, path)
    assert store.put(key_of(5), kv_of(5))
    assert agrees_with_files(store, path)
    store.close()


def test_a_rebuilt_index_evicts_the_oldest_file_first(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    filled(path)
    for number, age in enumerate((50, 10, 40, 20)):
        os.utime(file_of(path, key_of(number)), (1e9 - age, 1e9 - age))
    delete_all(path / "index")
    store = opened(path, 2 * entry_size(path))
    assert [n for n in range(4) if key_of(n) in store] == [1, 3]
    store.close()


def test_an_index_that_breaks_while_open_costs_no_right_answer(tmp_path: Path, caplog: Any) -> None:
    path = tmp_path / "kv"
    filled(path)
    store = opened(path)
    execute("DROP TABLE Cache", "DELETE FROM Settings")(path / "index")
    with caplog.at_level(logging.WARNING):
        assert [holds(store, n) for n in range(4)] == [True] * 4
        assert store.put(key_of(7), kv_of(7)) is False
        assert store.put(key_of(8), kv_of(8)) is False
    assert len([r for r in caplog.records if r.levelno == logging.WARNING]) == 1
    assert store.stats()[0].failed_writes == 2
    assert store.stats()[0].entries == 4
    assert store.forget("acme/docs", frozenset({"chunk-1"})) == 1
    assert [holds(store, n) for n in range(4)] == [True, False, True, True]
    store.close()
    again = opened(path)
    assert agrees_with_files(again, path)
    assert [holds(again, n) for n in range(4)] == [True, False, True, True]
    again.close()


def test_the_index_never_unpickles() -> None:
    json_disk = JsonDisk("unused")
    with pytest.raises(sqlite3.DatabaseError):
        json_disk.fetch(4, None, b"\x80\x03K\x01.", False)
    with pytest.raises(sqlite3.DatabaseError):
        json_disk.get(b"\x80\x03K\x01.", 0)
    with pytest.raises(TypeError):
        json_disk.put(("a", "tuple"))
    assert json_disk.store({"nbytes": 5}, False) == (5, 1, None, '{"nbytes": 5}')


def test_nothing_but_json_text_is_in_the_database(tmp_path: Path) -> None:
    filled(tmp_path / "kv")
    connection = sqlite3.connect(tmp_path / "kv" / "index" / "cache.db")
    rows = connection.execute(
        "SELECT typeof(key), raw, mode, filename, typeof(value), length(value) < 200 FROM Cache"
    )
    assert set(rows.fetchall()) == {("text", 1, 1, None, "text", 1)}
    connection.close()
