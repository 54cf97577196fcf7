"""A disk folder among several: forked children, stopped openers, forgets and kills in the middle of a put."""

from __future__ import annotations

import errno
import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from store_kit import (
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

from ragcachekit.errors import StoreError
from ragcachekit.store import disk, disk_shelf, index_file
from ragcachekit.store.disk import DiskStore
from ragcachekit.store.entry_header import EntryDamaged
from ragcachekit.store.folder import exclusive

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
            inherited.extend(copies(path / "index" / "lock"))

    store, other = DiskStore(path, 1 << 20, at=at), opened(path)
    assert store.put(key_of(1), kv_of(1))
    assert len(inherited) == 1
    with exclusive(path / "index" / "lock", 0.0):
        pass
    assert other.put(key_of(2), kv_of(2))
    for fd in inherited:
        os.close(fd)
    store.close()
    other.close()


def test_a_child_does_not_free_its_parents_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with exclusive(tmp_path / "lock", 0.0):
        (parents,) = copies(tmp_path / "lock")
        monkeypatch.setattr(os, "getpid", lambda: -1)
    monkeypatch.undo()
    with pytest.raises(BlockingIOError, match="stopped"), exclusive(tmp_path / "lock", 0.0):
        pass
    os.close(parents)
    with exclusive(tmp_path / "lock", 0.0):
        pass


@pytest.mark.parametrize("step", ["created", "half written", "written", "synced"])
@pytest.mark.parametrize("ids", [None, OURS])
def test_a_put_under_way_does_not_survive_a_forget(
    tmp_path: Path, step: str, ids: frozenset[str] | None
) -> None:
    path = tmp_path / "kv"
    forgetter = opened(path)
    writer = DiskStore(path, 1 << 20, at=lambda at: at == step and forgetter.forget("acme/docs", ids))
    assert writer.put(key_of(9), kv_of(9)) is False
    assert not holds(forgetter, 9)
    assert agrees_with_files(forgetter, path)
    assert writer.stats()[0].failed_writes == 1
    writer.close()
    again = opened(path)
    assert again.put(key_of(9), kv_of(9))
    assert holds(forgetter, 9)
    again.close()
    forgetter.close()


@pytest.mark.parametrize(
    ("namespace", "ids"), [("globex", None), ("globex", OURS), ("acme/docs", frozenset({"chunk-8"}))]
)
def test_forgetting_something_else_stops_no_put(tmp_path: Path, namespace: str, ids: frozenset[str]) -> None:
    path = tmp_path / "kv"
    forgetter = opened(path)
    writer = DiskStore(path, 1 << 20, at=lambda at: at == "synced" and forgetter.forget(namespace, ids))
    assert writer.put(key_of(9), kv_of(9))
    assert holds(forgetter, 9)
    writer.close()
    forgetter.close()


def test_what_a_killed_writer_left_of_a_forgotten_namespace_goes(tmp_path: Path) -> None:
    path, left = tmp_path / "kv", []

    def at(step: str) -> None:
        if step == "written":
            (temp,) = path.glob("*.tmp")
            left.append(path / f"{temp.name[:-6]}00.tmp")
            left[0].write_bytes(temp.read_bytes())

    store = DiskStore(path, 1 << 20, at=at)
    assert store.put(key_of(9), kv_of(9))
    assert store.forget("globex") == 0
    assert left[0].exists()
    assert store.forget("acme/docs", OURS) == 1
    assert not left[0].exists()
    store.close()


def test_a_forget_that_cannot_stop_a_put_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "kv"
    forgetter, said = opened(path), []

    def at(step: str) -> None:
        if step == "synced":
            with monkeypatch.context() as patch:
                patch.setattr(Path, "unlink", failing(errno.EIO))
                with pytest.raises(StoreError, match="forget again") as failure:
                    forgetter.forget("acme/docs")
                said.append(failure.value)

    writer = DiskStore(path, 1 << 20, at=at)
    assert writer.put(key_of(9), kv_of(9))
    assert len(said) == 1
    assert forgetter.forget("acme/docs") == 1
    for store in (writer, forgetter):
        store.close()


@pytest.mark.parametrize("loss", ["settled", "evicted", "rebuilt", "disowned"])
@pytest.mark.parametrize("older", [0, 8, 128], ids=["new", "in place of a smaller", "in place of a larger"])
def test_a_row_lost_before_its_file_has_a_name_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss: str, older: int
) -> None:
    """Others may evict an entry that is being flushed, or find that it has no file, or an older one."""
    path = tmp_path / "kv"
    other = opened(path)
    if older:
        assert other.put(key_of(9), kv_of(9, tokens=older))

    def at(step: str) -> None:
        if step == "synced":
            if loss == "settled":
                other._shelf.settle(key_of(9).digest())
            elif loss == "rebuilt":
                other._shelf.start_over()
            elif loss == "disowned":
                with monkeypatch.context() as patch:
                    patch.setattr(disk_shelf, "read_key", failing(errno.EIO))
                    other._shelf.start_over()
            else:
                with other._shelf._index.session():
                    other._shelf._shrink(0)

    writer = DiskStore(path, 1 << 20, at=at)
    assert writer.put(key_of(9), kv_of(9, tokens=16))
    for store in (writer, other):
        found = store.get(key_of(9))
        assert found is not None
        assert contents(found.kv) == contents(kv_of(9, tokens=16))
        assert agrees_with_files(store, path)
        assert store.stats()[0].entries == 1
        assert store._shelf.owners() == {key_of(9).digest(): "acme/docs"}
        store.close()


def test_an_index_that_was_made_anew_and_changed_as_often_is_another_one(tmp_path: Path) -> None:
    """The next one may even get the inode of the last one."""
    path, reserved = tmp_path / "kv", list[int]()
    database = path / "index" / "cache.db"

    def changes() -> int:
        return int.from_bytes(database.read_bytes()[24:28], "big")

    def at(step: str) -> None:
        if step == "synced" and not reserved and store._shelf.path(key_of(3).digest()).exists():
            reserved.append(changes())
            database.write_bytes(b"garbage" * 1000)
            for number in range(20, 40):
                if number == 20 or changes() < reserved[0]:
                    assert store.put(key_of(number), kv_of(number))

    store = DiskStore(path, 1 << 24, at=at)
    for number in range(4):
        assert store.put(key_of(number), kv_of(number))
    assert store.put(key_of(9), kv_of(9, tokens=64))
    assert changes() > reserved[0] >= 4, "made by puts meanwhile, as many as there were before"
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
    assert {"committed", "renamed", "folder synced"} <= seen.keys()
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
        patch.setattr(index_file, "locked", failing(errno.EAGAIN))
        with pytest.raises(EntryDamaged):
            source.layer(source.layers - 1)
    source.close()
    assert holds(writer, 0)
    for store in (reader, writer):
        store.close()


@pytest.mark.parametrize("lock", ["lock", "index/lock"])
def test_a_busy_folder_is_refused_in_the_end_and_its_index_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lock: str
) -> None:
    path = tmp_path / "kv"
    filled(path)
    before = (path / "index" / "cache.db").stat().st_ino
    monkeypatch.setattr(disk, "SECONDS_TO_OPEN", 0.0)
    with exclusive(path / lock, 0.0), pytest.raises(StoreError, match="is it stopped"):
        opened(path)
    assert (path / "index" / "cache.db").stat().st_ino == before
    store = opened(path)
    assert agrees_with_files(store, path)
    assert (path / "index" / "cache.db").stat().st_ino == before
    store.close()


def test_a_replacement_that_may_not_survive_a_power_failure_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kv"
    filled(path)
    store = opened(path)
    with monkeypatch.context() as patch:
        patch.setattr(disk_shelf, "sync_folder", failing(errno.EIO))
        assert store.put(key_of(1), kv_of(7)) is True, "what can be read is not refused"
    found = store.get(key_of(1))
    assert found is not None
    assert contents(found.kv) == contents(kv_of(7))
    assert agrees_with_files(store, path)
    store.close()
