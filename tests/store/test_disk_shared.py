"""A disk folder among several: stores that write in turn, forgets and writers in the middle of a put."""

import json
import os
import threading

import pytest

from faults import Faults, injected
from ragcachekit.store.disk import DiskStore
from ragcachekit.store.disk_folder import FolderLock, entry_files
from store_kit import agrees_with_files, entry_size, filled, holds, key_of, kv_of

OURS = frozenset({"chunk-9"})
CALLS = ("write", "utime", "replace")
"""Calls of a put, in the middle of which something else happens."""


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


@pytest.mark.parametrize(
    ("entries", "quota"), [(200, None), (40, None), (200, 30)], ids=str
)  # with room, full, over the quota
def test_stores_that_write_in_turn_do_not_list_the_folder(tmp_path, entries, quota, opened):
    path = tmp_path / "kv"
    filled(tmp_path / "probe")
    size = entry_size(tmp_path / "probe") + 64  # later numbers have more digits
    quotas = {} if quota is None else {"*": quota * size}
    store = opened(path, entries * size, quotas=quotas)
    for number in range(60):
        assert store.put(key_of(number), kv_of(number))
    stores = [store, *(opened(path, entries * size, quotas=quotas) for _ in range(2))]
    assert store.put(key_of(60), kv_of(60))
    with injected(Faults(path, 0, lambda _: False), reads=True) as faults:
        for number in range(61, 81):
            assert stores[number % 3].put(key_of(number), kv_of(number))
        for number in range(70, 75):
            stores[number % 2].evict(key_of(number))
        assert stores[2].put(key_of(81), kv_of(81))
    assert faults.calls.count("scandir") <= 1, "for further entries to evict, where the known ones have left"
    kept = [number for number in range(82) if key_of(number) in store]
    assert not set(kept) & set(range(70, 75))
    assert kept[-1] == 81
    assert len(kept) <= min(entries, quota or entries)
    assert json.loads((path / "writer").read_text())[0] == sum(entry_files(path).values())
    for one in stores:
        assert agrees_with_files(one, path)


def test_at_no_moment_do_the_sums_miss_a_file(tmp_path, opened):
    """So that a killed writer leaves the budget to the others."""
    path = tmp_path / "kv"

    def check(_):
        if (path / "writer").exists() and (text := (path / "writer").read_text()):
            assert json.loads(text)[0] >= sum(entry_files(path).values()), faults.calls[-1]
        return False

    filled(tmp_path / "probe")
    faults = Faults(path, 0, check)
    with injected(faults):
        store = opened(path, 6 * entry_size(tmp_path / "probe"))
        for number in range(9):
            assert store.put(key_of(number), kv_of(number))
        store.evict(key_of(8))
    assert {*CALLS, "unlink"} <= set(faults.calls)


@pytest.mark.parametrize("damage", [b"\xff" * 1000, b"[Infinity, null]", b"[9, 9]", None])
def test_a_damaged_file_of_sums_costs_nothing(tmp_path, damage, opened):
    path = tmp_path / "kv"
    filled(path)
    budget = 5 * entry_size(path)
    store, other = opened(path, budget), opened(path, budget)
    for number in range(4, 10):
        if damage is None:
            (path / "writer").unlink()
        else:
            (path / "writer").write_bytes(damage)
        assert (store, other)[number % 2].put(key_of(number), kv_of(number))
        assert agrees_with_files(store, path)
        assert store.stats()[0].nbytes <= budget
    assert [n for n in range(10) if key_of(n) in store] == [5, 6, 7, 8, 9]


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
