"""A disk folder among several: stores that write in turn, forgets and writers in the middle of a put."""

import os
import threading
import time

import pytest

from faults import Faults, injected
from ragcachekit.store.disk import DiskStore
from ragcachekit.store.disk_folder import FolderLock
from store_kit import agrees_with_files, entry_size, file_of, filled, holds, key_of, kv_of

OURS = frozenset({"chunk-9"})


def during(path, name, what):
    """Does something once, before the first call of this name below a folder."""
    done: list[bool] = []

    def happens(_):
        if faults.calls[-1] == name and not done:
            done.append(True)
            what()
        return False

    faults = Faults(path, 0, happens)
    return faults


def test_stores_that_write_in_turn_keep_the_budget_together(tmp_path, opened):
    path = tmp_path / "kv"
    filled(path)
    budget = 6 * entry_size(path) + 400
    stores = [opened(path, budget) for _ in range(3)]
    for number in range(4, 24):
        assert stores[number % 3].put(key_of(number), kv_of(number))
        assert holds(stores[(number + 1) % 3], 0), "in use all the time"
        assert agrees_with_files(stores[0], path)
        assert stores[0].stats()[0].nbytes <= budget
    assert [n for n in range(24) if key_of(n) in stores[0]] == [0, 19, 20, 21, 22, 23]
    assert stores[1].forget("acme/docs", frozenset({"chunk-20"})) == 1
    assert not holds(stores[2], 20)
    assert stores[2].put(key_of(30), kv_of(30)), "what another store removed makes room"
    assert [n for n in range(31) if key_of(n) in stores[0]] == [0, 19, 21, 22, 23, 30]


@pytest.mark.parametrize("quota", [None, 30])
def test_a_store_that_writes_alone_does_not_list_the_folder(tmp_path, quota, opened):
    path = tmp_path / "kv"
    filled(tmp_path / "probe")
    size = entry_size(tmp_path / "probe") + 64  # later numbers have more digits
    store = opened(path, 40 * size, quotas={} if quota is None else {"*": quota * size})
    with injected(Faults(path, 0, lambda _: False), reads=True) as faults:
        for number in range(80):
            assert store.put(key_of(number), kv_of(number))
        store.discard(key_of(79))
    assert "scandir" not in faults.calls
    kept = [number for number in range(80) if key_of(number) in store]
    assert kept == list(range(80 - len(kept) - 1, 79))
    assert 25 <= len(kept) <= (quota or 40)
    assert agrees_with_files(store, path)


def test_stores_that_write_in_turn_keep_the_budget_where_times_are_coarse(tmp_path, monkeypatch, opened):
    """On a file system with times of whole seconds, all of this happens within one."""
    path, real, second = tmp_path / "kv", os.utime, time.time_ns() // 10**9 * 10**9
    filled(path)
    monkeypatch.setattr(os, "utime", lambda target, *, ns: real(target, ns=(second, second)))
    budget = 6 * entry_size(path) + 400
    stores = [opened(path, budget) for _ in range(2)]
    for number in range(4, 24):
        assert stores[number % 2].put(key_of(number), kv_of(number))
        assert stores[0].stats()[0].nbytes <= budget


def test_files_that_were_removed_by_hand_make_room(tmp_path, opened):
    path = tmp_path / "kv"
    filled(path)
    store = opened(path, 4 * entry_size(path))
    file_of(path, key_of(3)).unlink()
    assert store.put(key_of(9), kv_of(9))
    assert [n for n in range(10) if holds(store, n)] == [0, 1, 2, 9]


@pytest.mark.parametrize(("call", "ids"), [("write", None), ("utime", OURS), ("replace", OURS)])
def test_a_put_under_way_does_not_survive_a_forget(tmp_path, call, ids, opened):
    path, gone = tmp_path / "kv", list[int]()
    writer, forgetter = opened(path), opened(path)
    forgetting = threading.Thread(target=lambda: gone.append(forgetter.forget("acme/docs", ids)))
    with injected(during(path, call, forgetting.start)):
        assert writer.put(key_of(9), kv_of(9))
        forgetting.join()
    assert gone == [1]
    assert not holds(forgetter, 9)
    assert not holds(writer, 9)
    assert agrees_with_files(forgetter, path)


@pytest.mark.parametrize(
    ("namespace", "ids"), [("globex", None), ("globex", OURS), ("acme/docs", frozenset({"chunk-8"}))]
)
def test_forgetting_something_else_stops_no_put(tmp_path, namespace, ids, opened):
    path, gone = tmp_path / "kv", list[int]()
    writer, forgetter = opened(path), opened(path)
    forgetting = threading.Thread(target=lambda: gone.append(forgetter.forget(namespace, ids)))
    with injected(during(path, "replace", forgetting.start)):
        assert writer.put(key_of(9), kv_of(9))
        forgetting.join()
    assert gone == [0]
    assert holds(forgetter, 9)


def test_orphans_of_the_dead_are_swept_and_files_of_the_living_are_not(tmp_path, opened):
    path, opener = tmp_path / "kv", list[DiskStore]()
    filled(path)
    for name in (f"{os.getpid()}-{'0' * 16}.tmp", f"999999999-{'a' * 16}.tmp"):
        (path / name).write_bytes(b"half an entry")
    store = opened(path)
    assert list(path.glob("*.tmp")) == []
    opening = threading.Thread(target=lambda: opener.append(opened(path)))
    with injected(during(path, "write", opening.start)):
        assert store.put(key_of(9), kv_of(9)), "nobody took the temporary file away"
        opening.join()
    assert holds(opener[0], 9)
    (path / f"1-{'0' * 16}.tmp").write_bytes(b"half of what is to be forgotten")
    assert store.forget("acme/docs", OURS) == 1
    assert list(path.glob("*.tmp")) == []


def copies(path):
    """What a child forked now would have of an open file: descriptors that share its lock."""
    wanted, found = path.stat(), []
    for name in os.listdir("/dev/fd"):
        try:
            if os.path.samestat(os.fstat(int(name)), wanted):
                found.append(int(name))
        except OSError:  # the one that lists them
            continue
    return list(map(os.dup, found))


def test_a_child_forked_during_a_put_keeps_nobody_out(tmp_path, opened):
    path, inherited = tmp_path / "kv", list[int]()
    store, other = opened(path), opened(path)
    with injected(during(path, "write", lambda: inherited.extend(copies(path / "lock")))):
        assert store.put(key_of(1), kv_of(1))
    assert len(inherited) == 1
    with FolderLock(path / "lock").held(0.0):
        pass
    assert other.put(key_of(2), kv_of(2))
    for fd in inherited:
        os.close(fd)
