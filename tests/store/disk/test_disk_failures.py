"""The disk tier on a full or failing medium: refused, counted, logged once, nothing else lost."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ragcachekit import files
from ragcachekit.errors import StoreError
from ragcachekit.store import disk_files as disk_shelf
from ragcachekit.store import disk_files as folder
from ragcachekit.store import entry as entry_file
from ragcachekit.store import entry as entry_image
from ragcachekit.store.disk import DiskStore
from ragcachekit.types import KVKey
from store_kit import (
    DISK_BUDGET,
    KEY,
    agrees_with_files,
    contents,
    entry_size,
    failing,
    file_of,
    filled,
    holds,
    key_of,
    kv_of,
    opened,
)


@pytest.mark.parametrize("code", [errno.EIO, errno.EROFS])
@pytest.mark.parametrize("after", [0, 1])
def test_a_failing_disk_refuses_and_keeps_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any, code: int, after: int
) -> None:
    path = tmp_path / "kv"
    filled(path)
    store = opened(path)
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(entry_image, "write_all", failing(code, after))
        assert store.put(key_of(9), kv_of(9)) is False
        assert store.put(key_of(1), kv_of(9)) is False
    assert len([r for r in caplog.records if r.levelno == logging.WARNING]) == 1
    assert store.stats()[0].failed_writes == 2
    assert [holds(store, n) for n in (0, 1, 2, 3, 9)] == [True, True, True, True, False]
    assert agrees_with_files(store, path)
    assert store.put(key_of(9), kv_of(9))
    assert holds(store, 9)
    store.close()


@pytest.mark.parametrize(
    ("where", "name"), [(folder.os, "replace"), (disk_shelf, "temp_file"), (folder.FileLock, "acquire")]
)
def test_any_step_of_a_write_may_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: Any, name: str
) -> None:
    path = tmp_path / "kv"
    filled(path)
    store = opened(path)
    with monkeypatch.context() as patch:
        patch.setattr(where, name, failing(errno.EIO))
        assert store.put(key_of(9), kv_of(9)) is False
    assert store.stats()[0].failed_writes == 1
    assert [holds(store, n) for n in (0, 1, 2, 3, 9)] == [True, True, True, True, False]
    assert agrees_with_files(store, path)
    store.close()


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(tmp_path / "kv")
    with monkeypatch.context() as patch:
        real = os.write
        patch.setattr(files.os, "write", lambda fd, view: real(fd, view[:7]))
        assert store.put(KEY, kv_of(1))
    found = store.get(KEY)
    assert found is not None
    assert contents(found.kv) == contents(kv_of(1))
    store.close()


def test_a_failing_read_is_a_miss_that_deletes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kv"
    filled(path)
    store = opened(path)
    with monkeypatch.context() as patch:
        patch.setattr(entry_file.os, "preadv", failing(errno.EIO))
        assert store.get(key_of(1)) is None
    assert holds(store, 1)
    assert store.stats()[0].damaged == 0
    store.close()


def test_a_file_that_cannot_be_deleted_is_reported_by_forget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kv"
    filled(path)
    store = opened(path)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", undeletable(key_of(1)))
        with pytest.raises(StoreError, match="1 entries could not be read or deleted; forget again"):
            store.forget("acme/docs")
    assert [holds(store, n) for n in range(4)] == [False] * 4
    assert agrees_with_files(store, path)
    assert store.forget("acme/docs") == 1
    store.close()


def undeletable(*keys: KVKey) -> Callable[..., None]:
    """A stand-in for ``Path.unlink`` that cannot delete these entries' files."""
    real, names = Path.unlink, {file_of(Path(), key).name for key in keys}

    def unlink(path: Path, missing_ok: bool = False) -> None:
        if path.name in names:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(path, missing_ok=missing_ok)

    return unlink


def test_files_that_cannot_be_deleted_are_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    path = tmp_path / "kv"
    filled(path, entries=6)
    budget = 6 * entry_size(path)
    store = opened(path, budget)
    monkeypatch.setattr(Path, "unlink", undeletable(key_of(0), key_of(2)))
    for number in range(10, 22):
        assert store.put(key_of(number), kv_of(number))
        assert store.stats()[0].nbytes <= budget
    assert [n for n in range(22) if holds(store, n)] == [0, 2, 18, 19, 20, 21]
    assert agrees_with_files(store, path)
    assert [r.getMessage().split(" from ")[0] for r in caplog.records if r.levelno == logging.WARNING] == [
        "disk tier: cannot delete"
    ]
    store.close()


def test_if_nothing_can_be_deleted_a_put_fails_and_the_budget_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kv"
    filled(path, entries=12)
    store = opened(path, 12 * entry_size(path))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", undeletable(*map(key_of, range(12))))
        assert store.put(key_of(20), kv_of(20)) is False
    assert store.put(key_of(20), kv_of(20))
    assert sum(holds(store, n) for n in range(12)) == 11
    assert agrees_with_files(store, path)
    store.close()


@pytest.mark.parametrize("readable", [True, False])
def test_a_folder_with_a_damaged_file_that_cannot_be_deleted_opens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, readable: bool
) -> None:
    path = tmp_path / "kv"
    filled(path)
    os.truncate(file_of(path, key_of(1)), 100)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", undeletable(key_of(1)))
        if not readable:
            patch.setattr(disk_shelf, "read_key", failing(errno.EIO))
        store = DiskStore(path, DISK_BUDGET, quotas={"*": 50})
    assert agrees_with_files(store, path)
    assert file_of(path, key_of(1)).exists(), "counted, so that the budget holds"
    store.close()
