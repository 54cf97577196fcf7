"""The disk tier on a full or failing medium: refused, counted, logged once, nothing else lost."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path
from typing import Any

import pytest
from store_kit import (
    KEY,
    agrees_with_files,
    contents,
    failing,
    filled,
    holds,
    key_of,
    kv_of,
    opened,
)

from ragcachekit.store import disk, disk_shelf, entry_file, folder


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
@pytest.mark.parametrize("after", [0, 1])
def test_a_full_or_failing_disk_refuses_and_keeps_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any, code: int, after: int
) -> None:
    path = tmp_path / "kv"
    filled(path)
    store = opened(path)
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(entry_file, "write_all", failing(code, after))
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
    ("where", "name"),
    [(disk_shelf.os, "fsync"), (disk_shelf.os, "replace"), (disk_shelf, "sync_folder"), (disk, "temp_file")],
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
        patch.setattr(folder.os, "writev", lambda fd, parts: os.write(fd, parts[0][:7]))
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


def test_a_file_that_cannot_be_deleted_is_not_counted_as_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kv"
    filled(path)
    store = opened(path)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", failing(errno.EPERM))
        assert store.forget("acme/docs") == 0
    assert agrees_with_files(store, path)
    assert store.forget("acme/docs") == 4
    store.close()
