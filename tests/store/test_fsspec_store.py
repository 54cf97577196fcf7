"""The bulk tier on folders and on file systems that fail or hang when told to."""

import stat
import threading

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from test_store_machine import RemoteMachine, few

from ragcachekit.errors import StoreError
from ragcachekit.store.backends import FsspecStore
from ragcachekit.store.memory import HostStore
from ragcachekit.store.tiered import TieredStore
from redis_kit import KEY_BYTES, forget_at_last
from store_kit import KEY, contents, key_of, kv_of

BUDGET = 1 << 20
SHORT = 0.05


def opened(path, **changes):
    return FsspecStore(path.as_uri(), **({"key": KEY_BYTES, "deadline": 20.0} | changes))


def files(path):
    return sorted(path.glob("*/*.kv"))


def interrupted(base, before):
    """A file system that calls ``before`` with the name of each operation on objects."""

    def method(name):
        def call(self, *args, **kwargs):
            before(name)
            return getattr(base, name)(self, *args, **kwargs)

        return call

    names = ["cat_file", "pipe_file", "rm_file", "find", "exists"]
    return type("Interrupted", (base,), {name: method(name) for name in names} | {"cachable": False})()


def store_on(fs, root, deadline=20.0):
    return FsspecStore(root, key=KEY_BYTES, deadline=deadline, fs=fs)


class Fails:
    """Raises for the operations named, while there are any."""

    def __init__(self):
        self.names: set[str] = set()

    def __call__(self, name):
        if name in self.names:
            raise OSError(f"{name} fails")


class Hangs:
    """Keeps the operations named waiting until told to go on."""

    def __init__(self):
        self.names: set[str] = set()
        self.go_on = threading.Event()
        self.inside = threading.Event()

    def __call__(self, name):
        if name in self.names:
            self.inside.set()
            self.go_on.wait(60)


@pytest.fixture
def hangs():
    hangs = Hangs()
    yield hangs
    hangs.go_on.set()


def test_one_file_per_entry_in_a_folder_of_our_own(tmp_path):
    store = opened(tmp_path / "kv")
    for number in range(3):
        store.put(key_of(number), kv_of(number))
    store.put(key_of(0, namespace="globex/docs"), kv_of(1))
    found = files(tmp_path / "kv")
    assert {path.stem for path in found} == {
        key.digest() for key in (*map(key_of, range(3)), key_of(0, namespace="globex/docs"))
    }
    assert len({path.parent for path in found}) == 2
    assert stat.S_IMODE((tmp_path / "kv").stat().st_mode) == 0o700


def test_a_later_process_finds_the_entries(tmp_path):
    first = opened(tmp_path)
    for number in range(5):
        first.put(key_of(number), kv_of(number))
    first.close()
    second = opened(tmp_path)
    assert all(key_of(number) in second for number in range(5))
    found = second.get(key_of(4))
    assert contents(found.kv) == contents(kv_of(4))


def test_entries_of_another_process_are_read_and_forgotten(tmp_path):
    ours, theirs = opened(tmp_path), opened(tmp_path)
    assert theirs.put(KEY, kv_of(1))
    assert ours.get(KEY) is not None
    assert theirs.put(key_of(5), kv_of(1))
    assert theirs.put(key_of(6), kv_of(1))
    assert ours.forget(KEY.namespace, frozenset({"chunk-5"})) == 1
    assert ours.forget(KEY.namespace, frozenset({"neighbour"})) == 1
    assert theirs.get(KEY) is None
    assert theirs.get(key_of(5)) is None
    assert theirs.get(key_of(6)) is not None


def test_a_write_that_fails_leaves_no_half_of_an_entry(tmp_path):
    class Full(LocalFileSystem):
        cachable = False

        def pipe_file(self, path, value, **options):
            super().pipe_file(path, value[: len(value) // 2])
            raise OSError("no space left")

    store = store_on(Full(), str(tmp_path))
    assert not store.put(KEY, kv_of(2))
    assert store.stats()[0].failed_writes == 1
    assert (store.get(KEY), files(tmp_path)) == (None, [])


def test_half_an_entry_is_a_miss_and_is_deleted(tmp_path):
    store = opened(tmp_path)
    store.put(KEY, kv_of(1))
    (path,) = files(tmp_path)
    path.write_bytes(path.read_bytes()[:-1])
    assert store.get(KEY) is None
    assert (store.stats()[0].damaged, files(tmp_path)) == (1, [])


def test_a_forget_that_fails_half_way_says_so_and_is_finished_by_the_next(tmp_path):
    left = [2]

    def before(name):
        if name == "rm_file":
            left[0] -= 1
            if left[0] == -1:
                raise OSError("rm_file fails once")

    store = store_on(interrupted(LocalFileSystem, before), str(tmp_path))
    for number in range(5):
        store.put(key_of(number), kv_of(number))
    with pytest.raises(StoreError, match="rm_file fails once"):
        store.forget("acme/docs")
    assert len(files(tmp_path)) == 1, "the one that stays keeps no other"
    assert store.forget("acme/docs") == 1
    assert files(tmp_path) == []


@pytest.mark.parametrize("chunk_ids", [frozenset({"neighbour"}), None])
def test_entries_of_a_failed_forget_are_misses_until_one_succeeds(tmp_path, chunk_ids):
    fails = Fails()
    host, bulk = HostStore(BUDGET), store_on(interrupted(LocalFileSystem, fails), str(tmp_path))
    store = TieredStore([host, bulk])
    forgotten, other = key_of(1, context=("neighbour",)), key_of(2, context=("other",))
    elsewhere = key_of(1, namespace="globex")
    every = (forgotten, other, elsewhere)
    assert all(store.put(key, kv_of(1)) for key in every)
    fails.names = {"rm_file"}
    with pytest.raises(StoreError, match="forget again: OSError: rm_file fails"):
        store.forget("acme/docs", chunk_ids)
    fails.names = set()
    served = [False, chunk_ids is not None, True]
    assert [store.get(key) is not None for key in every] == served
    assert [key in store for key in every] == served
    assert forgotten not in host
    assert not bulk.put(forgotten, kv_of(2))
    assert store.forget("acme/docs", frozenset({"chunk-3"})) == 0
    assert store.get(forgotten) is None, "that was another chunk"
    store.forget("acme/docs", chunk_ids)
    assert [path.stem for path in files(tmp_path)].count(forgotten.digest()) == 0
    assert store.put(forgotten, kv_of(3))
    assert store.get(forgotten) is not None


@pytest.mark.usefixtures("patient")
def test_a_write_that_ends_after_its_forget_does_not_stay(tmp_path, hangs):
    store = store_on(interrupted(LocalFileSystem, hangs), str(tmp_path), SHORT)
    hangs.names = {"pipe_file"}
    assert not store.put(KEY, kv_of(1))
    assert hangs.inside.is_set()
    with pytest.raises(StoreError, match="an earlier write has not ended"):
        store.forget(KEY.namespace)
    hangs.go_on.set()
    forget_at_last(store, KEY.namespace)
    assert store.get(KEY) is None
    assert files(tmp_path) == []


class ForgottenWhileSaved(FsspecStore):
    """Another caller forgets the entry just before it would be written."""

    def write_blob(self, key, blob, wanted):
        self.forget(key.namespace)
        return super().write_blob(key, blob, wanted)


def test_a_forget_that_overtakes_a_write_wins(tmp_path):
    store = ForgottenWhileSaved(tmp_path.as_uri(), key=KEY_BYTES, deadline=20.0)
    assert not store.put(KEY, kv_of(1))
    assert files(tmp_path) == []


def test_bad_arguments_say_what_to_do(tmp_path):
    with pytest.raises(ValueError, match="openssl"):
        opened(tmp_path, key=None)
    with pytest.raises(ValueError, match="Protocol not known"):
        FsspecStore("nosuchthing://bucket", key=KEY_BYTES, deadline=1.0)
    fsspec.register_implementation(
        "absent", "no_such_module.FileSystem", clobber=True, errtxt="Install absentfs"
    )
    with pytest.raises(StoreError, match=r"absentfs.*pip install"):
        FsspecStore("absent://bucket", key=KEY_BYTES, deadline=1.0)


# -- any sequence of operations, against a dict ----------------------------------------------------------

FS = fsspec.filesystem("memory")


class FsspecMachine(RemoteMachine):
    bounded, put_too_large = False, None  # without a budget

    def open(self):
        if FS.exists("/machine"):
            FS.rm("/machine", recursive=True)
        return self.opened()

    def opened(self, key=KEY_BYTES):
        return FsspecStore("memory://machine", key=key, deadline=20)

    def blobs(self):
        return {
            path.rpartition("/")[2].removesuffix(".kv"): FS.cat_file(path) for path in FS.find("/machine")
        }

    def put_blob(self, key, blob):
        (path,) = [path for path in FS.find("/machine") if key.digest() in path]
        FS.pipe_file(path, blob)


TestFsspecMachine = FsspecMachine.TestCase
TestFsspecMachine.settings = few(10, 30)
