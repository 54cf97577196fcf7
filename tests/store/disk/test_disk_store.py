"""The disk tier: who may use its folder, what persists, who else may be at work in it."""

from __future__ import annotations

import errno
import os
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

from ragcachekit.errors import StoreError
from ragcachekit.store import disk_files as folder
from ragcachekit.store import entry as entry_image
from ragcachekit.store.disk import DiskStore
from store_kit import (
    KEY,
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


def test_folder_is_0700_and_every_file_0600(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        path = tmp_path / "parent" / "kv"
        store = opened(path)
        store.put(KEY, kv_of(1))
        found = {p: stat.S_IMODE(p.stat().st_mode) for p in (path, *path.rglob("*"))}
        store.close()
    finally:
        os.umask(old)
    assert {mode for p, mode in found.items() if p.is_dir()} == {0o700}
    files = {p.name: mode for p, mode in found.items() if p.is_file()}
    assert set(files.values()) == {0o600}
    assert {"writer", "lock", file_of(path, KEY).name} <= files.keys()


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(tmp_path / "kv")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(StoreError, match=r"belongs to uid .*choose another disk_path"):
        opened(tmp_path / "kv")


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o777])
def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(StoreError, match="chmod 700"):
        opened(tmp_path)


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kv").write_text("")
    with pytest.raises(StoreError, match="is a file"):
        opened(tmp_path / "kv")
    with pytest.raises(StoreError, match="cannot write"):
        opened(tmp_path / "kv" / "below")


@pytest.mark.parametrize("code", [errno.EACCES, errno.EPERM, errno.ENAMETOOLONG])
def test_an_unwritable_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    monkeypatch.setattr(folder.FileLock, "acquire", failing(code))
    with pytest.raises(StoreError, match=r"cannot write to the cache folder .*disk_path"):
        opened(tmp_path / "kv")


def test_strangers_files_are_left_alone(tmp_path: Path) -> None:
    notes = {"notes.txt": b"mine", "12-abc.tmp": b"also mine", "model.safetensors": b"mine too"}
    for name, data in notes.items():
        (tmp_path / name).write_bytes(data)
    tmp_path.chmod(0o700)
    store = opened(tmp_path)
    store.put(KEY, kv_of(1))
    assert store.forget("acme/docs") == 1
    store.close()
    assert {name: (tmp_path / name).read_bytes() for name in notes} == notes


def test_entries_and_order_of_use_survive_reopening(tmp_path: Path) -> None:
    filled(tmp_path / "kv", entries=4)
    store = opened(tmp_path / "kv")
    assert holds(store, 0)
    store.close()
    smaller = opened(tmp_path / "kv", 2 * entry_size(tmp_path / "kv"))
    assert [n for n in range(4) if key_of(n) in smaller] == [0, 3]
    assert smaller.stats()[0].evictions == 2
    assert agrees_with_files(smaller, tmp_path / "kv")
    smaller.close()


def test_room_is_made_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While an entry is written, the folder exceeds the budget by no more than that entry."""
    path = tmp_path / "kv"
    filled(path, entries=1)
    size = entry_size(path)
    store = opened(path, 3 * size)
    seen: list[int] = []
    write_all = entry_image.write_all

    def watched(fd: int, parts: Any, offset: int = 0) -> int:
        end = write_all(fd, parts, offset)
        seen.append(sum(p.stat().st_size for p in path.iterdir() if p.suffix in (".tmp", ".safetensors")))
        return end

    monkeypatch.setattr(entry_image, "write_all", watched)
    for number in range(8):
        assert store.put(key_of(number), kv_of(number))
    assert max(seen) <= 3 * size  # a new one has its room before
    for _ in range(8):
        assert store.put(key_of(7), kv_of(7))
    store.close()
    assert max(seen) <= 4 * size  # one that takes an older one's place is there beside it


def test_on_a_full_medium_room_is_made_for_a_second_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a volume that holds less than the budget."""
    path = tmp_path / "kv"
    filled(path, entries=1)
    room = 3 * entry_size(path)
    ours, theirs = opened(path), opened(path, room)
    for number in range(1, 4):
        assert theirs.put(key_of(number), kv_of(number))
    write_all = entry_image.write_all

    def full(fd: int, parts: Any, offset: int = 0) -> int:
        end = write_all(fd, parts, offset)
        if (
            sum(file.stat().st_size for file in path.iterdir() if file.suffix in (".tmp", ".safetensors"))
            > room
        ):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return end

    monkeypatch.setattr(entry_image, "write_all", full)
    assert ours.put(key_of(9), kv_of(9))
    assert [n for n in (1, 2, 3, 9) if holds(ours, n)] == [2, 3, 9]
    assert agrees_with_files(ours, path)
    ours.close()
    theirs.close()


def test_what_a_writer_named_before_it_was_killed_counts_for_others(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    filled(path, entries=2)
    other = opened(path, 3 * entry_size(path))
    assert other.put(key_of(1), kv_of(1))

    def at(step: str) -> None:
        if step == "renamed":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        DiskStore(path, 1 << 20, at=at).put(key_of(9), kv_of(9))
    assert other.put(key_of(2), kv_of(2))
    assert [holds(other, n) for n in (0, 1, 2, 9)] == [False, True, True, True]
    assert agrees_with_files(other, path)
    other.close()


def test_a_replacement_that_fails_leaves_the_old_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kv"
    filled(path, entries=3)
    store = opened(path, 3 * entry_size(path))
    with monkeypatch.context() as patch:
        patch.setattr(entry_image, "write_all", failing(errno.ENOSPC, after=1))
        assert store.put(key_of(0), kv_of(0, tokens=6)) is False
    assert holds(store, 0)
    store.close()


def test_only_a_deletion_is_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power failure may cost what was put last; it does not bring back what was forgotten."""
    path, flushed, real = tmp_path / "kv", list[list[str]](), os.fsync

    def fsync(fd: int) -> None:
        assert os.path.samestat(os.fstat(fd), path.stat())
        flushed.append([file.name for file in path.glob("*.safetensors")])
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    store = opened(path)
    for number in (1, 2):
        assert store.put(key_of(number), kv_of(number))
    assert flushed == []
    assert store.forget("acme/docs", frozenset({"chunk-1"})) == 1
    assert flushed == [[file_of(path, key_of(2)).name]]
    store.close()


def test_the_budget_holds_when_another_writer_fills_the_folder_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    filled(path, entries=3)
    budget = 3 * entry_size(path)
    theirs, put = opened(path, budget), list[bool]()
    writer = threading.Thread(target=lambda: put.append(theirs.put(key_of(8), kv_of(8))))
    ours = DiskStore(path, budget, at=lambda step: step == "half written" and writer.start())
    assert ours.put(key_of(9), kv_of(9))
    writer.join()
    assert put == [True]
    assert [n for n in (0, 1, 2, 8, 9) if holds(ours, n)] == [2, 8, 9]
    assert ours.stats()[0].nbytes <= budget
    assert agrees_with_files(ours, path)
    ours.close()
    theirs.close()


def test_orphans_of_the_dead_are_swept_and_files_of_the_living_are_not(tmp_path: Path) -> None:
    path, opener = tmp_path / "kv", list[DiskStore]()
    filled(path)
    for name in (f"{os.getpid()}-{'0' * 16}.tmp", f"999999999-{'a' * 16}.tmp"):
        (path / name).write_bytes(b"half an entry")
    opening = threading.Thread(target=lambda: opener.append(opened(path)))
    store = DiskStore(path, 1 << 20, at=lambda step: step == "half written" and opening.start())
    assert list(path.glob("*.tmp")) == []
    assert store.put(key_of(9), kv_of(9)), "nobody took the temporary file away"
    opening.join()
    assert holds(opener[0], 9)
    assert list(path.glob("*.tmp")) == []
    store.close()
    opener[0].close()


def test_two_stores_share_a_folder(tmp_path: Path) -> None:
    filled(tmp_path / "kv", entries=1)
    size = entry_size(tmp_path / "kv")
    one, two = opened(tmp_path / "kv", 3 * size), opened(tmp_path / "kv", 3 * size)
    for number in range(1, 9):
        writer, reader = (one, two) if number % 2 else (two, one)
        assert writer.put(key_of(number), kv_of(number))
        assert holds(reader, number)
        assert one.stats()[0].nbytes == two.stats()[0].nbytes <= 3 * size
    assert [n for n in range(9) if holds(one, n)] == [6, 7, 8]
    assert two.forget("acme/docs", frozenset({"chunk-7"})) == 1
    assert not holds(one, 7)
    assert agrees_with_files(one, tmp_path / "kv")
    one.close()
    two.close()
