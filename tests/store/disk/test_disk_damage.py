"""The disk tier: damaged, renamed and missing files; an index that is lost, damaged or lies."""

from __future__ import annotations

import errno
import logging
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ragcachekit.store.disk import folder
from ragcachekit.store.entry.header import EntryDamaged
from store_kit import (
    agrees_with_files,
    entry_size,
    failing,
    file_of,
    filled,
    holds,
    key_of,
    kv_of,
    opened,
)


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
    store.close()
    store = opened(path)
    assert agrees_with_files(store, path)
    store.close()


def test_a_file_deleted_by_hand_is_a_miss_and_leaves_the_index_at_the_next_start(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    filled(path)
    store = opened(path)
    file_of(path, key_of(1)).unlink()
    assert not holds(store, 1)
    assert store.stats()[0].damaged == 0
    store.close()
    store = opened(path)
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


def of_a_later_format(index: Path) -> None:
    with (index / "cache.db").open("r+b") as file:
        file.seek(18)  # says whether this version of SQLite may write it
        file.write(b"\x09")


def schema_no_text(index: Path) -> None:
    content = (index / "cache.db").read_bytes()
    (index / "cache.db").write_bytes(content.replace(b"INDEX by_digest", b"INDEX\xc8by_digest"))


INDEX_DAMAGE: dict[str, Callable[[Path], None]] = {
    "deleted": delete_all,
    "overwritten": overwrite,
    "cut short": cut_short,
    "of a later format": of_a_later_format,
    "schema no text": schema_no_text,
    "row lost": execute("DELETE FROM entries WHERE used = (SELECT MIN(used) FROM entries)"),
    "row lost with its sum": execute(
        "DELETE FROM entries WHERE used = (SELECT MIN(used) FROM entries)",
        "UPDATE totals SET entries = entries - 1, nbytes = (SELECT SUM(nbytes) FROM entries)",
    ),
    "row too many": execute("INSERT INTO entries(digest, namespace, nbytes) VALUES ('ff', 'x', 9)"),
    "wrong size": execute("UPDATE entries SET nbytes = 1"),
    "wrong size and sum": execute("UPDATE entries SET nbytes = 1", "UPDATE totals SET nbytes = 4"),
    "negative size": execute("UPDATE entries SET nbytes = -9", "UPDATE totals SET nbytes = -36"),
    "size no number": execute("UPDATE entries SET nbytes = 'many'", "UPDATE totals SET nbytes = 'many'"),
    "another's entry": execute("UPDATE entries SET namespace = 'globex'"),
    "a pickle": execute(
        "UPDATE entries SET digest = x'80034b012e' WHERE used = (SELECT MAX(used) FROM entries)"
    ),
    "wrong sum": execute("UPDATE totals SET nbytes = 1"),
    "sum lost": execute("DELETE FROM totals"),
    "sum no number": execute("UPDATE totals SET nbytes = 'none'"),
    "table lost": execute("DROP TABLE entries"),
    "column more": execute("ALTER TABLE entries ADD COLUMN surprise TEXT"),
    "a trigger": execute("CREATE TRIGGER t AFTER DELETE ON entries BEGIN DELETE FROM totals; END"),
    "empty database": execute("DROP TABLE entries", "DROP TABLE totals"),
    "in WAL mode": execute("PRAGMA journal_mode = WAL", "UPDATE totals SET nbytes = 1"),
    "a stranger's": execute("DROP TABLE totals", "CREATE TABLE Cache (key, raw, value)"),
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


BROKEN_WHILE_OPEN = {
    name: INDEX_DAMAGE[name]
    for name in (
        "overwritten",
        "table lost",
        "sum lost",
        "wrong sum",
        "deleted",
        "schema no text",
        "empty database",
        "column more",
    )
}


@pytest.mark.parametrize("damage", BROKEN_WHILE_OPEN.values(), ids=BROKEN_WHILE_OPEN)
def test_an_index_that_breaks_while_open_is_rebuilt_and_costs_nothing(
    tmp_path: Path, caplog: Any, damage: Callable[[Path], None]
) -> None:
    path = tmp_path / "kv"
    filled(path)
    store, other = opened(path), opened(path)
    damage(path / "index")
    with caplog.at_level(logging.WARNING):
        assert [holds(store, n) for n in range(4)] == [True] * 4
        assert store.put(key_of(7), kv_of(7))
        assert other.put(key_of(8), kv_of(8))
    assert store.stats()[0].failed_writes == other.stats()[0].failed_writes == 0
    assert [holds(store, n) for n in (0, 1, 2, 3, 7, 8)] == [True] * 6
    assert store.forget("acme/docs", frozenset({"chunk-1"})) == 1
    assert [holds(other, n) for n in range(4)] == [True, False, True, True]
    store.close()
    other.close()
    again = opened(path)
    assert agrees_with_files(again, path)
    again.close()


def test_an_index_that_cannot_be_written_refuses_and_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kv"
    filled(path)
    store = opened(path)
    with monkeypatch.context() as patch:
        patch.setattr(folder.FileLock, "acquire", failing(errno.EACCES))
        assert [holds(store, n) for n in range(4)] == [True] * 4
        assert store.put(key_of(8), kv_of(8)) is False
        assert store.stats()[0].failed_writes == 1
        assert store.stats()[0].entries == 4
        assert store.forget("acme/docs", frozenset({"chunk-1"})) == 1
        assert [holds(store, n) for n in range(4)] == [True, False, True, True]
    assert store.put(key_of(8), kv_of(8))
    assert [holds(store, n) for n in (0, 1, 2, 3, 8)] == [True, False, True, True, True]
    store.close()
    store = opened(path)
    assert agrees_with_files(store, path)
    store.close()


def test_a_good_file_put_in_place_of_a_damaged_one_is_not_dropped(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    filled(path, entries=1)
    store = opened(path)
    with file_of(path, key_of(0)).open("r+b") as file:
        file.seek(-5, os.SEEK_END)
        file.write(b"xxxxx")
    source = store.open(key_of(0))
    assert source is not None
    assert store.put(key_of(0), kv_of(0))
    with pytest.raises(EntryDamaged):
        source.layer(source.layers - 1)
    source.close()
    assert holds(store, 0)
    assert store.stats()[0].damaged == 1
    store.close()
