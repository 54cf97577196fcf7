"""Disk tiers on a volume that is full, read-only or failing: opened, read, later written again."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from faults import Faults, injected
from ragcachekit import StoreConfig
from ragcachekit.errors import StoreError
from ragcachekit.prefix_tree.disk import ForgetLog
from ragcachekit.store import entry as entry_image
from ragcachekit.store.disk import default_disk_bytes
from ragcachekit.store.factory import open_store
from store_kit import entry_size, failing, filled, holds, key_of, kv_of, opened

CODES = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
NEVER = 1 << 30


@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.get)
@pytest.mark.parametrize("lasting", [False, True], ids=["one call", "from a call on"])
@pytest.mark.parametrize("there", [False, True], ids=["new", "with entries"])
def test_any_call_of_opening_may_fail(tmp_path: Path, code: int, lasting: bool, there: bool) -> None:
    """For every n the n-th call that writes fails: it opens, what was there is read, then it writes again."""
    if there:
        filled(tmp_path / "before" / "a" / "kv")

    def tried(number: int) -> list[str]:
        root = tmp_path / str(number)
        shutil.copytree(tmp_path / "before", root) if there else root.mkdir()
        path, faults = root / "a" / "kv", Faults(root, code, number.__le__ if lasting else number.__eq__)
        with injected(faults):
            store = opened(path)
            calls = list(faults.calls)
            if number > len(calls):
                return calls
            assert [holds(store, n) for n in range(4)] == [there] * 4
            kept = store.put(key_of(9), kv_of(9))
            assert holds(store, 9) is kept
            assert store.stats()[0].failed_writes == (not kept)
            assert not (kept and lasting)
        assert store.put(key_of(8), kv_of(8))
        assert holds(store, 8)
        assert store.stats()[0].writable
        store.close()
        again = opened(path)
        assert [holds(again, n) for n in range(4)] == [there] * 4
        assert holds(again, 8)
        assert holds(again, 9) is kept
        again.close()
        return calls

    calls = tried(NEVER)
    assert len(calls) >= 6
    for number in range(1, len(calls) + 1):
        tried(number)


def test_it_says_so_once_and_in_stats(tmp_path: Path, caplog: Any) -> None:
    filled(tmp_path / "kv")
    with caplog.at_level(logging.WARNING), injected(Faults(tmp_path, errno.EROFS, lambda n: True)):
        store = opened(tmp_path / "kv")
        assert holds(store, 0)
        assert not store.put(key_of(9), kv_of(9))
        assert not store.put(key_of(9), kv_of(9))
        (stats,) = store.stats()
    assert (stats.writable, stats.failed_writes, stats.entries) == (False, 2, 4)
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(said) == 2
    assert "Read-only file system" in said[0]
    store.close()


def test_forgetting_on_a_full_volume_deletes_and_on_none_has_nothing_to_delete(tmp_path: Path) -> None:
    filled(tmp_path / "kv")
    spared = ("unlink",)
    faults = Faults(tmp_path, errno.ENOSPC, lambda n: faults.calls[-1] not in spared)
    with injected(faults):
        store, none = opened(tmp_path / "kv"), opened(tmp_path / "nowhere" / "kv")
        assert store.forget("acme/docs", frozenset(["chunk-1"])) == 1
        assert none.forget("acme/docs") == 0
        assert [holds(store, n) for n in range(4)] == [True, False, True, True]
    store.close()
    none.close()


def test_somebody_elses_folder_that_appears_later_is_not_read(tmp_path: Path) -> None:
    filled(tmp_path / "theirs")
    path = tmp_path / "kv"
    with injected(Faults(tmp_path, errno.ENOSPC, lambda n: True)):
        store = opened(path)
    shutil.move(tmp_path / "theirs", path)
    path.chmod(0o777)
    assert not holds(store, 1)
    assert key_of(1) not in store
    assert not store.put(key_of(9), kv_of(9))
    path.chmod(0o700)
    assert store.put(key_of(9), kv_of(9))
    assert holds(store, 1)
    store.close()


@pytest.mark.parametrize("there", ["a file", "others may write", "others' parent"])
def test_what_only_the_user_can_mend_stays_an_error(tmp_path: Path, there: str) -> None:
    path = tmp_path / "kv"
    if there == "a file":
        path.write_text("")
    elif there == "others may write":
        path.mkdir()
        path.chmod(0o777)
    else:
        (tmp_path / "file").write_text("")
        path = tmp_path / "file" / "kv"
    with pytest.raises(StoreError, match=r"is a file|chmod 700|Not a directory"):
        opened(path)


def test_a_volume_that_fills_up_loses_the_least_recent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first try finds no space, the second one does: as if the evicted entry had made it."""
    filled(tmp_path / "kv")
    store = opened(tmp_path / "kv")
    assert holds(store, 0)  # now 1 is the least recently used
    once = iter([errno.ENOSPC])
    real = entry_image.write_all

    def write(*args: Any) -> Any:
        for code in once:
            raise OSError(code, os.strerror(code))
        return real(*args)

    monkeypatch.setattr(entry_image, "write_all", write)
    assert store.put(key_of(9), kv_of(9))
    assert [holds(store, n) for n in (0, 1, 2, 3, 9)] == [True, False, True, True, True]
    (stats,) = store.stats()
    assert (stats.evictions, stats.failed_writes, stats.entries) == (1, 0, 4)
    store.close()


def test_a_volume_that_stays_full_takes_one_entry_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(tmp_path / "kv")
    store = opened(tmp_path / "kv")
    with monkeypatch.context() as patch:
        patch.setattr(entry_image, "write_all", failing(errno.ENOSPC))
        assert not any(store.put(key_of(9), kv_of(9)) for _ in range(5))
        assert not store.put(key_of(9), kv_of(9, tokens=4000)), "larger than all that could leave"
    (stats,) = store.stats()
    assert (stats.entries, stats.evictions, stats.failed_writes) == (3, 1, 6)
    store.close()


def test_the_default_budget_knows_the_volume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def volume(total: int, free: int) -> None:
        sizes = os.statvfs_result((4096, 4096, total // 4096, free // 4096, free // 4096, 0, 0, 0, 0, 255))
        monkeypatch.setattr(os, "statvfs", lambda path: sizes)

    missing = tmp_path / "not" / "yet"
    volume(1 << 40, 1 << 39)
    assert default_disk_bytes(missing) == 64 << 30
    volume(100 << 30, 40 << 30)
    assert default_disk_bytes(missing) == 20 << 30
    volume(100 << 30, 0)
    assert default_disk_bytes(missing) == 100 << 26
    filled(tmp_path / "kv")
    volume(1 << 20, 0)
    taken = 4 * entry_size(tmp_path / "kv")
    assert default_disk_bytes(tmp_path / "kv") == max(taken // 2, 1 << 16)
    store = open_store(StoreConfig(host_bytes=0, disk_path=tmp_path / "kv"))
    assert store.stats()[0].budget == max(taken // 2, 1 << 16)
    store.close()


@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.get)
def test_a_trees_folder_that_cannot_be_made_is_made_later(tmp_path: Path, code: int) -> None:
    with injected(Faults(tmp_path, code, lambda n: True)):
        log = ForgetLog(tmp_path / "forgets")
        with log.writing() as may_write:
            assert not may_write
        with log.forgetting("tenant", None):
            pass
    with log.writing() as may_write:
        assert may_write


def test_the_default_budget_is_not_below_what_is_stored_nor_disturbed_by_what_goes(tmp_path, monkeypatch):
    (tmp_path / "one.safetensors").write_bytes(b"x" * 5000)
    (tmp_path / "gone.safetensors").symlink_to(tmp_path / "evicted just now")
    full = SimpleNamespace(f_bavail=0, f_bfree=0, f_frsize=1, f_blocks=8000)
    monkeypatch.setattr(os, "statvfs", lambda _: full)
    assert default_disk_bytes(tmp_path) == 5000
