"""Forgetting on a disk that fails: what cannot be read or deleted now is reported, all else has gone."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest

from ragcachekit.errors import StoreError
from ragcachekit.store import disk
from ragcachekit.store import disk_files as disk_shelf
from ragcachekit.store.disk import DiskStore
from ragcachekit.types import KVKey
from store_kit import agrees_with_files, failing, file_of, filled, holds, key_of, kv_of, opened

NAMESPACE = "acme/docs"
OTHERS = key_of(8, namespace="others")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DiskStore]:
    filled(tmp_path / "kv")
    made = opened(tmp_path / "kv")
    assert made.put(OTHERS, kv_of(8))
    yield made
    made.close()


@pytest.mark.parametrize("ids", [None, frozenset({"chunk-1"})])
def test_an_unreadable_header_is_reported_and_the_others_go(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch, ids: frozenset[str] | None
) -> None:
    real = disk.read_key

    def read(path: Path) -> KVKey:
        if path.stem in (key_of(0).digest(), OTHERS.digest()):
            raise OSError(errno.EIO, "lost for now")
        return real(path)

    with monkeypatch.context() as patch:
        patch.setattr(disk, "read_key", read)
        with pytest.raises(StoreError, match="2 entries could not be read or deleted; forget again"):
            store.forget(NAMESPACE, ids)
    left = [holds(store, n) for n in range(4)]
    assert left == ([True, False, False, False] if ids is None else [True, False, True, True])
    assert store.forget(NAMESPACE) == sum(left)
    assert OTHERS in store
    assert agrees_with_files(store, store.folder)


@pytest.mark.parametrize("then", ["forget", "put"])
def test_what_cannot_be_deleted_is_reported_and_not_served(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    ids = frozenset({"chunk-1"})
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", failing(errno.EPERM))
        with pytest.raises(StoreError, match="1 entries could not be read or deleted; forget again"):
            store.forget(NAMESPACE, ids)
    assert file_of(store.folder, key_of(1)).exists()
    assert (store.get(key_of(1)), store.open(key_of(1)), key_of(1) in store) == (None, None, False)
    if then == "put":
        assert store.put(key_of(1), kv_of(1))
        assert holds(store, 1)
    assert store.forget(NAMESPACE, ids) == 1
    assert not file_of(store.folder, key_of(1)).exists()
    assert [holds(store, n) for n in range(4)] == [True, False, True, True]
    assert agrees_with_files(store, store.folder)


def test_a_folder_that_cannot_be_listed_is_reported(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(disk_shelf.os, "scandir", failing(errno.EIO))
        with pytest.raises(StoreError, match="forget again"):
            store.forget(NAMESPACE, frozenset({"chunk-1"}))
    assert store.forget(NAMESPACE) == 4
    assert OTHERS in store
