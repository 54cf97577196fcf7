"""A disk folder among several: forked children, stopped openers, forgets and kills in the middle of a put."""

from __future__ import annotations

import errno
import os
import sqlite3
import threading
from contextlib import closing
from pathlib import Path

import pytest

from ragcachekit.errors import StoreError
from ragcachekit.store.disk import disk_store as disk
from ragcachekit.store.disk import folder
from ragcachekit.store.disk.disk_store import DiskStore
from ragcachekit.store.disk.folder import FolderLock
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
        if step == "indexed":
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


def test_an_interrupted_release_frees_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock, real, calls = FolderLock(tmp_path / "lock"), folder.FileLock.release, iter(range(10))

    def release(file: folder.FileLock, force: bool = False) -> None:
        if next(calls) == 0:
            raise KeyboardInterrupt
        real(file, force=force)

    with monkeypatch.context() as patch:
        patch.setattr(folder.FileLock, "release", release)
        with pytest.raises(KeyboardInterrupt), lock.held(0.0):
            pass
    with FolderLock(tmp_path / "lock").held(0.0):
        pass


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


@pytest.mark.parametrize("step", ["created", "half written", "written", "committed", "renamed"])
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


def test_killed_while_a_smaller_entry_takes_a_larger_ones_place_nothing_is_uncounted(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    opened(path).put(key_of(9), kv_of(9, tokens=128))
    seen: dict[str, bool] = {}

    def at(step: str) -> None:
        database = f"file:{path / 'index' / 'cache.db'}?mode=ro"
        with closing(sqlite3.connect(database, uri=True, timeout=0)) as reader:
            try:
                ((counted,),) = reader.execute("SELECT nbytes FROM entries").fetchall()
            except sqlite3.OperationalError:  # in the middle of a transaction
                return
        seen[step] = counted >= entry_size(path)

    store = DiskStore(path, 1 << 20, at=at)
    assert store.put(key_of(9), kv_of(9))
    assert {"committed", "renamed"} <= seen.keys()
    assert [step for step, enough in seen.items() if not enough] == []
    for some in (store, opened(path)):
        assert agrees_with_files(some, path)
        some.close()


def test_a_good_file_in_place_of_a_damaged_one_stays_if_the_index_is_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kv"
    filled(path, entries=1)
    reader, writer = opened(path), opened(path)
    with file_of(path, key_of(0)).open("r+b") as file:
        file.seek(-5, os.SEEK_END)
        file.write(b"xxxxx")
    source = reader.open(key_of(0))
    assert source is not None
    assert writer.put(key_of(0), kv_of(0))
    with monkeypatch.context() as patch:
        patch.setattr(folder.FileLock, "acquire", failing(errno.EAGAIN))
        with pytest.raises(EntryDamaged):
            source.layer(source.layers - 1)
    source.close()
    assert holds(writer, 0)
    for store in (reader, writer):
        store.close()


def test_a_busy_folder_is_refused_in_the_end_and_its_index_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kv"
    filled(path)
    before = (path / "index" / "cache.db").stat().st_ino
    monkeypatch.setattr(disk, "SECONDS_TO_OPEN", 0.0)
    with FolderLock(path / "lock").held(0.0), pytest.raises(StoreError, match="is it stopped"):
        opened(path)
    assert (path / "index" / "cache.db").stat().st_ino == before
    store = opened(path)
    assert agrees_with_files(store, path)
    assert (path / "index" / "cache.db").stat().st_ino == before
    store.close()
