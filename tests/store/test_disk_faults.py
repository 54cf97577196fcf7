"""The disk tier on a medium that is full, read-only or failing: refused, counted, nothing else lost."""

import errno
import logging
import os
import shutil
from types import SimpleNamespace

import pytest
from filelock import FileLock

from faults import Faults, injected
from ragcachekit import StoreConfig
from ragcachekit.errors import StoreError
from ragcachekit.store import disk, disk_folder
from ragcachekit.store.disk import default_disk_bytes
from ragcachekit.store.tiered import open_store
from store_kit import KEY, agrees_with_files, contents, entry_size, file_of, filled, holds, key_of, kv_of

CODES = (errno.ENOSPC, errno.EIO)
NEVER = 1 << 30


def by_name(root, code, *names):
    """Every call of these names fails."""
    faults = Faults(root, code, lambda _: faults.calls[-1] in names)
    return faults


def refused(lock, code):
    def acquire(*_, **__):
        raise OSError(code, os.strerror(code))

    return acquire


@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.get)
@pytest.mark.parametrize("lasting", [False, True], ids=["one call", "from a call on"])
@pytest.mark.parametrize("there", [False, True], ids=["empty", "with entries"])
def test_any_call_of_opening_may_fail(tmp_path, code, lasting, there, opened):
    """For every n the n-th call that writes fails: it opens, what was there is read, then it writes again."""
    filled(tmp_path / "before" / "a" / "kv", entries=4 * there)

    def tried(number):
        root = tmp_path / str(number)
        shutil.copytree(tmp_path / "before", root)
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
        assert store.stats()[0].writable
        store.close()
        again = opened(path)
        assert [holds(again, n) for n in (0, 1, 2, 3, 8, 9)] == [there] * 4 + [True, kept]
        again.close()
        return calls

    calls = tried(NEVER)
    assert len(calls) >= 3
    for number in range(1, len(calls) + 1):
        tried(number)


@pytest.mark.parametrize(("code", "number"), [(errno.EIO, 1), (errno.EROFS, 9)])
def test_any_call_of_a_put_may_fail(tmp_path, code, number, opened):
    """A new entry, and one in place of an older one, with one to be evicted."""
    filled(tmp_path / "before")
    size = entry_size(tmp_path / "before")

    def tried(at):
        path, faults = tmp_path / str(at), Faults(tmp_path / str(at), code, at.__eq__)
        shutil.copytree(tmp_path / "before", path)
        store = opened(path, 4 * size)
        with injected(faults):
            kept = store.put(key_of(number), kv_of(9))
        assert store.stats()[0].failed_writes == (not kept)
        found = store.get(key_of(number))
        values = [contents(kv_of(9)), *([contents(kv_of(1))] if number == 1 and not kept else [])]
        assert (found is None and not kept) or contents(found.kv) in values
        assert sum(holds(store, n) for n in (0, 2, 3)) >= 2, "one may have left for it"
        assert agrees_with_files(store, path)
        assert store.put(key_of(8), kv_of(8))
        assert holds(store, 8)
        assert store.stats()[0].nbytes <= 4 * size
        store.close()
        return faults.calls

    calls = tried(NEVER)
    assert {"open", "write", "replace"} <= set(calls)
    for at in range(1, len(calls) + 1):
        tried(at)


def test_failures_are_said_once_and_in_stats(tmp_path, caplog, opened):
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


def test_a_lock_that_cannot_be_taken_refuses_and_answers(tmp_path, monkeypatch, opened):
    path = tmp_path / "kv"
    filled(path)
    store = opened(path)
    with monkeypatch.context() as patch:
        patch.setattr(FileLock, "acquire", refused(FileLock, errno.EACCES))
        assert [holds(store, n) for n in range(4)] == [True] * 4
        assert store.put(key_of(8), kv_of(8)) is False
        assert (store.stats()[0].failed_writes, store.stats()[0].entries) == (1, 4)
        assert store.forget("acme/docs", frozenset({"chunk-1"})) == 1
        assert [holds(store, n) for n in range(4)] == [True, False, True, True]
    assert store.put(key_of(8), kv_of(8))
    assert agrees_with_files(store, path)


def test_short_reads_and_writes_are_continued(tmp_path, opened):
    made, path = kv_of(1, tokens=5000), tmp_path / "kv"
    store = opened(path, 1 << 30)
    faults = Faults(path, 0, lambda n: n % 2 and faults.calls[-1] in ("write", "preadv"), cut=True)
    with injected(faults, reads=True):
        assert store.put(KEY, made)
        found = store.get(KEY)
    assert contents(found.kv) == contents(made)
    assert {"write", "preadv"} <= set(faults.calls)


def test_a_failing_read_is_a_miss_that_deletes_nothing(tmp_path, opened):
    path = tmp_path / "kv"
    filled(path)
    store = opened(path)
    source = store.open(key_of(1))
    with injected(by_name(path, errno.EIO, "preadv"), reads=True):
        assert store.get(key_of(1)) is None
        with pytest.raises(OSError, match="Input/output"):
            source.layer(0)
    source.close()
    assert holds(store, 1)
    assert store.stats()[0].damaged == 0


def undeletable(path, *numbers):
    """Entries whose files cannot be deleted."""
    names = {str(file_of(path, key_of(n))) for n in numbers}

    class Kept(Faults):
        def concerns(self, target):
            return isinstance(target, str | os.PathLike) and os.fspath(target) in names

    faults = Kept(path, errno.EIO, lambda _: faults.calls[-1] == "unlink")
    return faults


@pytest.mark.parametrize(("ids", "then"), [(None, "forget"), (frozenset({"chunk-1", "chunk-2"}), "put")])
def test_what_cannot_be_deleted_is_reported_by_forget_and_not_served(tmp_path, ids, then, opened):
    path = tmp_path / "kv"
    filled(path)
    store, other = opened(path), opened(path)
    with (
        injected(undeletable(path, 1)),
        pytest.raises(StoreError, match=r"1 entries could not be .* forget again"),
    ):
        store.forget("acme/docs", ids)
    assert file_of(path, key_of(1)).exists()
    assert (store.get(key_of(1)), store.open(key_of(1)), key_of(1) in store) == (None, None, False)
    assert key_of(1) not in set(store.keys())
    assert [holds(store, n) for n in (0, 2, 3)] == [ids is not None, False, ids is not None]
    if then == "put":
        assert store.put(key_of(1), kv_of(1))
        assert holds(store, 1)
    assert store.forget("acme/docs", ids) == 1
    assert agrees_with_files(store, path)
    assert other.put(key_of(1), kv_of(1))
    assert holds(store, 1), "another process computed it anew"


def test_what_cannot_be_read_is_reported_by_forget_and_the_others_go(tmp_path, opened):
    path = tmp_path / "kv"
    filled(path)
    store = opened(path)
    others = key_of(8, namespace="others")
    assert store.put(others, kv_of(8))
    faults = Faults(
        path, errno.EIO, lambda n: faults.calls[:n].count("preadv") == 1 and faults.calls[-1] == "preadv"
    )
    with (
        injected(faults, reads=True),
        pytest.raises(StoreError, match=r"1 entries could not be .* forget again"),
    ):
        store.forget("acme/docs", frozenset(f"chunk-{n}" for n in range(4)))
    assert sum(holds(store, n) for n in range(4)) == 1
    with (
        injected(by_name(path, errno.EIO, "scandir"), reads=True),
        pytest.raises(StoreError, match="forget again"),
    ):
        store.forget("acme/docs")
    assert store.forget("acme/docs") == 1
    assert others in store


def test_only_a_deletion_is_flushed(tmp_path, opened):
    """A power failure may cost what was put last; it does not bring back what was forgotten."""
    store, faults = opened(tmp_path / "kv"), Faults(tmp_path, 0, lambda n: False)
    with injected(faults):
        for number in (1, 2):
            assert store.put(key_of(number), kv_of(number))
        assert "fsync" not in faults.calls
        assert store.forget("acme/docs", frozenset({"chunk-1"})) == 1
    assert faults.calls[-1] == "fsync"


def test_the_default_budget_depends_on_the_volume(tmp_path, monkeypatch):
    def volume(total, free):
        full = SimpleNamespace(f_bavail=free, f_bfree=free, f_frsize=1, f_blocks=total)
        monkeypatch.setattr(os, "statvfs", lambda _: full)

    missing = tmp_path / "not" / "yet"
    for total, free, budget in ((1 << 40, 1 << 39, 64 << 30), (100 << 30, 40 << 30, 20 << 30)):
        volume(total, free)
        assert default_disk_bytes(missing) == budget
    filled(tmp_path / "kv")
    filled(tmp_path / "probe")
    (tmp_path / "kv" / "gone.safetensors").symlink_to(tmp_path / "evicted just now")
    taken = 4 * entry_size(tmp_path / "probe")
    volume(8000, 0)
    assert default_disk_bytes(tmp_path / "kv") == taken, "not below what is stored"
    store = open_store(StoreConfig(host_bytes=0, disk_path=tmp_path / "kv"))
    assert store.stats()[0].budget == taken
    store.close()


def test_a_stopped_process_is_named(tmp_path, monkeypatch, opened):
    path = tmp_path / "kv"
    filled(path)
    store = opened(path)
    monkeypatch.setattr(disk, "SECONDS_TO_OPEN", 0.0)
    monkeypatch.setattr(disk_folder, "SECONDS_TO_LOCK", 0.1)
    with FileLock(path / "lock", mode=0o600, is_singleton=False):
        with pytest.raises(StoreError, match="is a process stopped"):
            opened(path)
        with pytest.raises(StoreError, match=r"forget again .* is a process stopped"):
            store.forget("acme/docs", frozenset({"chunk-1"}))
        assert [holds(store, n) for n in range(4)] == [True, False, True, True], "what is there has gone"
    assert store.forget("acme/docs") == 3
