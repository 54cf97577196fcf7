"""The disk tier: damaged, renamed and missing files."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from ragcachekit.store import disk_files as folder
from ragcachekit.store.entry import EntryDamaged
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


@pytest.mark.parametrize("step", ["layer", "header"])
def test_a_damaged_file_goes_only_if_it_was_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    path = tmp_path / "kv"
    filled(path)
    store, other = opened(path), opened(path)
    data = bytearray(file_of(path, key_of(1)).read_bytes())
    data[-1 if step == "layer" else 60] ^= 4
    file_of(path, key_of(1)).write_bytes(bytes(data))
    if step == "layer":
        source = store.open(key_of(1))
        assert source is not None
        assert other.put(key_of(1), kv_of(1))
        with pytest.raises(EntryDamaged):
            source.layer(source.layers - 1)
        source.close()
    else:
        remove = store._files.remove

        def late(digest: str, seen: os.stat_result | None = None) -> bool:
            assert other.put(key_of(1), kv_of(1))
            return remove(digest, seen)

        monkeypatch.setattr(store._files, "remove", late)
        assert not holds(store, 1)
    assert store.stats()[0].damaged == 1
    assert holds(other, 1)
    store.close()
    other.close()


def test_damage_while_closed_is_found_at_the_read(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    filled(path)
    with file_of(path, key_of(0)).open("r+b") as file:
        file.truncate(100)
    with file_of(path, key_of(2)).open("r+b") as file:
        file.seek(-5, os.SEEK_END)
        file.write(b"xxxxx")
    store = opened(path)
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


def test_a_file_deleted_by_hand_is_a_miss_and_no_longer_counts(tmp_path: Path) -> None:
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


def test_the_least_recently_used_file_is_evicted_first_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    filled(path)
    for number, age in enumerate((50, 10, 40, 20)):
        os.utime(file_of(path, key_of(number)), (1e9 - age, 1e9 - age))
    store = opened(path)
    assert holds(store, 0)
    store.close()
    store = opened(path, 2 * entry_size(path))
    assert [n for n in range(4) if key_of(n) in store] == [0, 1]
    store.close()


@pytest.mark.parametrize("damage", [b"", b"\xff" * 1000, b"[Infinity, null]", b"[9, 9]", b"{}", None])
def test_a_damaged_writer_file_costs_nothing(tmp_path: Path, damage: bytes | None) -> None:
    path = tmp_path / "kv"
    filled(path)
    budget = 5 * entry_size(path)
    store, other = opened(path, budget), opened(path, budget)
    for number in range(4, 10):
        if damage is None:
            (path / "writer").unlink()
        else:
            (path / "writer").write_bytes(damage)
        assert (store, other)[number % 2].put(key_of(number), kv_of(number))
        assert agrees_with_files(store, path)
        assert store.stats()[0].nbytes <= budget
    assert [n for n in range(10) if key_of(n) in store] == [5, 6, 7, 8, 9]
    store.close()
    other.close()


def test_a_lock_that_cannot_be_taken_refuses_and_answers(
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
