"""A disk folder among several: forked children, stopped openers, forgets and kills in the middle of a put."""

from __future__ import annotations

import errno
import json
import os
import threading
from pathlib import Path

import pytest

from ragcachekit.errors import StoreError
from ragcachekit.store import disk
from ragcachekit.store import disk_files as folder
from ragcachekit.store.disk import DiskStore
from ragcachekit.store.disk_files import FolderLock, entry_files
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

OURS = frozenset({"chunk-9"})


def copies(path: Path) -> list[int]:
    """What a child forked now would have of an open file: descriptors that share its lock."""
    wanted, found = path.stat(), []
    for name in os.listdir("/dev/fd"):
        try:
            if os.path.samestat(os.fstat(int(name)), wanted):
                found.append(int(name))
        except OSError:  # the one that lists them
            continue
    return list(map(os.dup, found))


def test_a_child_forked_during_a_session_keeps_nobody_out(tmp_path: Path) -> None:
    path, inherited = tmp_path / "kv", []

    def at(step: str) -> None:
        if step == "written":
            inherited.extend(copies(path / "lock"))

    store, other = DiskStore(path, 1 << 20, at=at), opened(path)
    assert store.put(key_of(1), kv_of(1))
    assert len(inherited) == 1
    with FolderLock(path / "lock").held(0.0):
        pass
    assert other.put(key_of(2), kv_of(2))
    for fd in inherited:
        os.close(fd)
    store.close()
    other.close()


def put_and_forget(
    path: Path, step: str, namespace: str, ids: frozenset[str] | None
) -> tuple[bool, int, bool]:
    """Have a put meet a forget at one of its steps: what both returned, and whether the entry is there."""
    forgetter, gone = opened(path), list[int]()
    forgetting = threading.Thread(target=lambda: gone.append(forgetter.forget(namespace, ids)))
    writer = DiskStore(path, 1 << 20, at=lambda at: at == step and forgetting.start())
    kept = writer.put(key_of(9), kv_of(9))
    forgetting.join()
    there = holds(forgetter, 9)
    assert holds(writer, 9) is there
    assert agrees_with_files(forgetter, path)
    for store in (writer, forgetter):
        store.close()
    return kept, gone[0], there


@pytest.mark.parametrize("step", ["created", "half written", "written", "renamed"])
@pytest.mark.parametrize("ids", [None, OURS])
def test_a_put_under_way_does_not_survive_a_forget(
    tmp_path: Path, step: str, ids: frozenset[str] | None
) -> None:
    assert put_and_forget(tmp_path / "kv", step, "acme/docs", ids) == (True, 1, False)


@pytest.mark.parametrize(
    ("namespace", "ids"), [("globex", None), ("globex", OURS), ("acme/docs", frozenset({"chunk-8"}))]
)
def test_forgetting_something_else_stops_no_put(tmp_path: Path, namespace: str, ids: frozenset[str]) -> None:
    assert put_and_forget(tmp_path / "kv", "written", namespace, ids) == (True, 0, True)


def test_what_a_killed_writer_left_goes_with_the_next_forget(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    store = opened(path)
    left = path / f"1-{'0' * 16}.tmp"
    left.write_bytes(b"half of what is to be forgotten")
    assert store.forget("acme/docs", OURS) == 0
    assert not left.exists()
    store.close()


def test_a_forget_that_cannot_wait_for_a_writer_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kv"
    filled(path)
    forgetter = opened(path)
    monkeypatch.setattr(disk, "SECONDS_TO_OPEN", 0.0)
    monkeypatch.setattr(folder.FileLock, "acquire", stopped)
    with pytest.raises(StoreError, match=r"forget again .* is it stopped"):
        forgetter.forget("acme/docs", frozenset({"chunk-1"}))
    monkeypatch.undo()
    assert [holds(forgetter, n) for n in range(4)] == [True, False, True, True], "what is there has gone"
    assert forgetter.forget("acme/docs") == 3
    forgetter.close()


def stopped(lock: folder.FileLock, timeout: float) -> None:
    raise folder.Timeout(lock.lock_file)


def test_an_open_file_that_cannot_be_deleted_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on Windows, where an open file can be neither deleted nor replaced."""
    path = tmp_path / "kv"
    filled(path)
    store, in_use, real, replace = opened(path), set[str](), Path.unlink, os.replace

    def unlink(file: Path, missing_ok: bool = False) -> None:
        if file.name in in_use:
            raise PermissionError(errno.EACCES, "used by another process", str(file))
        real(file, missing_ok=missing_ok)

    def rename(old: str, new: str) -> None:
        if os.path.basename(new) in in_use:
            raise PermissionError(errno.EACCES, "used by another process", new)
        replace(old, new)

    monkeypatch.setattr(Path, "unlink", unlink)
    monkeypatch.setattr(os, "replace", rename)
    in_use |= {file_of(path, key_of(n)).name for n in (1, 2)}
    assert store.put(key_of(2), kv_of(5)) is False, "the older one is read meanwhile"
    assert holds(store, 2)
    with pytest.raises(StoreError, match="forget again: cannot delete"):
        store.forget("acme/docs", frozenset({"chunk-0", "chunk-1"}))
    assert [holds(store, n) for n in range(4)] == [False, False, True, True]
    in_use.clear()
    assert store.forget("acme/docs", frozenset({"chunk-0", "chunk-1"})) == 1
    assert [holds(store, n) for n in range(4)] == [False, False, True, True]
    assert agrees_with_files(store, path)
    store.close()


def test_stores_that_write_in_turn_keep_the_budget_together(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    filled(path)
    budget = 6 * entry_size(path)
    stores = [opened(path, budget) for _ in range(3)]
    for number in range(4, 24):
        assert stores[number % 3].put(key_of(number), kv_of(number))
        assert holds(stores[(number + 1) % 3], 0), "in use all the time"
        assert agrees_with_files(stores[0], path)
        assert stores[0].stats()[0].nbytes <= budget
    assert [n for n in range(24) if key_of(n) in stores[0]] == [0, 19, 20, 21, 22, 23]
    for store in stores:
        store.close()


@pytest.mark.parametrize(
    ("entries", "quota"), [(200, None), (40, None), (200, 100), (200, 30)], ids=str
)  # with room, full, with room below the quota, over the quota
def test_stores_that_write_in_turn_do_not_list_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entries: int, quota: int | None
) -> None:
    path, listings, scan = tmp_path / "kv", [0], folder._scan
    filled(tmp_path / "probe")
    size = entry_size(tmp_path / "probe") + 8  # later numbers have more digits
    quotas = {} if quota is None else {"*": quota * size}

    def counted(folder: Path) -> list[tuple[str, os.stat_result]]:
        listings[0] += 1
        return scan(folder)

    store = DiskStore(path, entries * size, quotas=quotas)
    for number in range(60):
        assert store.put(key_of(number), kv_of(number))
    stores = [store, *(DiskStore(path, entries * size, quotas=quotas) for _ in range(2))]
    with monkeypatch.context() as patch:
        patch.setattr(folder, "_scan", counted)
        assert store.put(key_of(60), kv_of(60))
        listings[0] = 0
        for number in range(61, 81):
            assert stores[number % 3].put(key_of(number), kv_of(number))
        assert listings == [0]
        for number in range(70, 75):
            stores[number % 2].evict(key_of(number))
        assert stores[2].put(key_of(81), kv_of(81))
        assert listings == [0]
    kept = [number for number in range(82) if key_of(number) in store]
    first = max(0, 81 - min(entries, quota or entries))
    assert kept == [number for number in range(first, 82) if number not in range(70, 75)]
    sizes = sum(entry_files(path).values())
    assert json.loads((path / "writer").read_text())[0] == sizes
    for one in stores:
        assert agrees_with_files(one, path)
        one.close()


def test_at_no_moment_do_the_sums_miss_a_file(tmp_path: Path) -> None:
    """So that a killed writer leaves the budget to the others."""
    path, seen = tmp_path / "kv", set[str]()

    def at(step: str) -> None:
        if (path / "writer").exists():
            seen.add(step)
            total, _ = json.loads((path / "writer").read_text())
            assert total >= sum(entry_files(path).values()), step

    filled(tmp_path / "probe")
    store = DiskStore(path, 6 * entry_size(tmp_path / "probe"), at=at)
    for number in range(9):
        assert store.put(key_of(number), kv_of(number))
    store.evict(key_of(8))
    assert seen == set(disk.STEPS) - {"read"}
    store.close()


def test_what_another_store_removed_makes_room(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    filled(path)
    store, other = opened(path, 4 * entry_size(path)), opened(path)
    assert store.put(key_of(0), kv_of(0))
    assert other.forget("acme/docs", frozenset({"chunk-2", "chunk-3"})) == 2
    assert store.put(key_of(4), kv_of(4))
    assert store.put(key_of(5), kv_of(5))
    assert [n for n in range(6) if key_of(n) in store] == [0, 1, 4, 5]
    store.close()
    other.close()


def test_a_put_that_fails_after_its_file_was_named_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    filled(path)
    failing_now = [False]

    def at(step: str) -> None:
        if step == "renamed" and failing_now[0]:
            raise OSError(errno.EIO, "failed late")

    store = DiskStore(path, 5 * entry_size(path), at=at)
    assert store.put(key_of(0), kv_of(0))
    failing_now[0] = True
    assert not store.put(key_of(4), kv_of(4))
    failing_now[0] = False
    assert store.put(key_of(5), kv_of(5))
    assert store.stats()[0].entries == 5
    assert agrees_with_files(store, path)
    store.close()


def test_a_busy_folder_is_refused_in_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "kv"
    filled(path)
    monkeypatch.setattr(disk, "SECONDS_TO_OPEN", 0.0)
    with FolderLock(path / "lock").held(0.0), pytest.raises(StoreError, match="is it stopped"):
        opened(path)
    store = opened(path)
    assert agrees_with_files(store, path)
    store.close()
