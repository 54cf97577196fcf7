"""A damaged SQLite file is a miss or right: never what belongs to another key."""

import random
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ragcachekit.json_store import JsonStore

TEXTS = [f"What is known of topic {number}?" for number in range(40)]


def row(text: str) -> list[float]:
    return np.random.default_rng(list(text.encode())).standard_normal(24).astype(np.float32).tolist()


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    with JsonStore(folder) as store:
        store.put({text: row(text) for text in TEXTS})
    with sqlite3.connect(folder / "cache.db") as database:
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return folder


def wrong(folder: Path) -> list[str]:
    """Keys with another value than their own."""
    with JsonStore(folder) as store:
        found = {text: store.get(text) for text in TEXTS}
    return [text for text, kept in found.items() if kept is not None and kept != row(text)]


def test_values_that_changed_places_are_missing(saved, tmp_path):
    folder = shutil.copytree(saved, tmp_path / "copy")
    with sqlite3.connect(folder / "cache.db") as database:
        rows = database.execute("SELECT rowid, value FROM entries").fetchall()
        for (number, _), (_, value) in zip(rows, rows[1:] + rows[:1], strict=True):
            database.execute("UPDATE entries SET value = ? WHERE rowid = ?", (value, number))
    assert wrong(folder) == []
    with JsonStore(folder) as store:
        assert store.get(TEXTS[0]) is None


def test_keys_that_changed_places_are_missing(tmp_path):
    with JsonStore(tmp_path) as store:
        store.put({"a": 1, "b": 2, "c": 3})
    with sqlite3.connect(tmp_path / "cache.db") as database:
        for old, new in (("a", "x"), ("b", "a"), ("x", "b")):
            database.execute("UPDATE entries SET key = ? WHERE key = ?", (f'"{new}"', f'"{old}"'))
    with JsonStore(tmp_path) as store:
        assert [store.get(key) for key in "abc"] == [None, None, 3]
        assert [key for key in store.keys() if store.get(key) is not None] == ["c"]  # noqa: SIM118


def flip(data: bytearray, rng: random.Random) -> None:
    data[rng.randrange(100, len(data))] ^= 1 << rng.randrange(8)


def copy_block(data: bytearray, rng: random.Random) -> None:
    size = rng.choice([2, 8, 64, 512, 4096])
    here, there = (rng.randrange(100, len(data) - size) for _ in range(2))
    data[here : here + size] = data[there : there + size]


def exchange_cells(data: bytearray, rng: random.Random) -> None:
    """Two entries of a page's array of cell pointers: SQLite finds another row under a key."""
    page = 4096 * rng.randrange(1, len(data) // 4096)
    start = page + (8 if data[page] in (10, 13) else 12)
    count = int.from_bytes(data[page + 3 : page + 5])
    if data[page] in (2, 5, 10, 13) and 1 < count < 1000:
        one, other = (start + 2 * rng.randrange(count) for _ in range(2))
        data[one : one + 2], data[other : other + 2] = data[other : other + 2], data[one : one + 2]


@pytest.mark.parametrize("damage", [flip, copy_block, exchange_cells])
@pytest.mark.parametrize("seed", range(8))
def test_a_damaged_file_holds_no_value_of_another_key(
    saved: Path, tmp_path: Path, damage: Callable[[bytearray, random.Random], None], seed: int
):
    folder, rng = shutil.copytree(saved, tmp_path / "copy"), random.Random(seed)
    database = folder / "cache.db"
    data = bytearray(database.read_bytes())
    for _ in range(rng.choice([1, 3, 10])):
        damage(data, rng)
    database.write_bytes(data)
    assert wrong(folder) == []
