"""Forgetting on a disk that fails: what cannot be read or deleted now is not served, or the caller hears."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ragcachekit.errors import StoreError
from ragcachekit.store.disk import entry_files as disk_shelf
from ragcachekit.store.disk import folder, index
from ragcachekit.store.disk import forgets as disk_forget
from ragcachekit.store.disk.disk_store import DiskStore
from ragcachekit.types import KVKey
from store_kit import agrees_with_files, contents, failing, file_of, filled, holds, key_of, kv_of, opened

NAMESPACE = "acme/docs"
OTHERS = key_of(8, namespace="others")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DiskStore]:
    filled(tmp_path / "kv")
    made = opened(tmp_path / "kv")
    assert made.put(OTHERS, kv_of(8))
    yield made
    made.close()


def unreadable(*keys: KVKey) -> Callable[[Path], KVKey]:
    """A stand-in for ``read_key`` to which the headers of ``keys`` are lost for now."""
    names, real = {key.digest() for key in keys}, disk_forget.read_key

    def read(path: Path) -> KVKey:
        if path.stem in names:
            raise OSError(errno.EIO, "lost for now")
        return real(path)

    return read


def test_an_unreadable_header_goes_with_its_namespace_and_no_other(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(disk_forget, "read_key", unreadable(key_of(0), OTHERS))
        assert store.forget(NAMESPACE) == 4
    assert [holds(store, n) for n in range(4)] == [False] * 4
    assert OTHERS in store
    assert agrees_with_files(store, store.folder)


def test_whose_it_is_may_be_known_though_not_which_chunk(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(disk_forget, "read_key", unreadable(key_of(0), OTHERS))
        assert store.forget(NAMESPACE, frozenset({"chunk-1"})) == 2
    assert [holds(store, n) for n in range(4)] == [False, False, True, True]
    assert OTHERS in store


def test_what_nobody_knows_is_hidden_until_it_is_gone(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(disk_forget, "read_key", unreadable(key_of(0), OTHERS))
        patch.setattr(index.EntryIndex, "owners", broken_index)
        assert store.forget(NAMESPACE, frozenset({"chunk-0", "chunk-1"})) == 1
    assert file_of(store.folder, key_of(0)).exists()
    assert [holds(store, n) for n in range(4)] == [False, False, True, True]
    assert not file_of(store.folder, key_of(0)).exists()
    assert store.get(OTHERS) is not None
    assert store.put(key_of(0), kv_of(0))
    assert holds(store, 0)


def broken_index(*_: object) -> Any:
    raise folder.IndexFailed("not now")


@pytest.mark.parametrize("way", ["get", "open", "in", "put"])
def test_what_cannot_be_deleted_is_not_served(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    path = file_of(store.folder, key_of(1))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", failing(errno.EPERM))
        assert store.forget(NAMESPACE, frozenset({"chunk-1"})) == 0
        assert (store.get(key_of(1)), store.open(key_of(1)), key_of(1) in store) == (None, None, False)
        assert store.put(key_of(1), kv_of(9)) is False
        assert path.exists()
        assert holds(store, 0)
    if way == "put":
        assert store.put(key_of(1), kv_of(9))
        found = store.get(key_of(1))
        assert found is not None
        assert contents(found.kv) == contents(kv_of(9))
    else:
        asked = {"get": store.get, "open": store.open, "in": store.__contains__}[way](key_of(1))
        assert not asked
        assert not path.exists()
    assert agrees_with_files(store, store.folder)


def test_a_folder_that_cannot_be_listed_is_reported_and_what_is_known_goes(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(disk_shelf.os, "scandir", failing(errno.EIO))
        with pytest.raises(StoreError, match="forget again"):
            store.forget(NAMESPACE, frozenset({"chunk-1"}))
        patch.setattr(index.EntryIndex, "owners", broken_index)
        with pytest.raises(StoreError, match="forget again"):
            store.forget(NAMESPACE)
    assert [holds(store, n) for n in range(4)] == [True, False, True, True]
    assert store.forget(NAMESPACE) == 3
    assert os.listdir(store.folder / "index")
    assert OTHERS in store
