"""The disk tier alone in its folder: who may use it, what persists, order of use, quotas, layers, damage."""

import os
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from faults import Faults, injected
from ragcachekit.errors import StoreError
from ragcachekit.model.kv import ChunkKV
from ragcachekit.store.base import LayerSource
from ragcachekit.store.disk_folder import EntryFolder
from ragcachekit.store.entry import EntryDamaged
from ragcachekit.store.eviction import Counters
from store_kit import KEY, agrees_with_files, contents, entry_size, file_of, filled, holds, key_of, kv_of


def left(store, count, namespace="acme/docs"):
    return [n for n in range(count) if key_of(n, namespace=namespace) in store]


def test_folders_are_0700_and_files_0600_whatever_the_umask(tmp_path, opened):
    old = os.umask(0)
    try:
        path = tmp_path / "parent" / "kv"
        store = opened(path)
        store.put(KEY, kv_of(1))
        store.close()
    finally:
        os.umask(old)
    found = {p: stat.S_IMODE(p.stat().st_mode) for p in tmp_path.rglob("*")}
    assert {mode for p, mode in found.items() if p.is_dir()} == {0o700}
    assert {p.name for p in found if p.is_file()} == {"lock", file_of(path, KEY).name}
    assert {mode for p, mode in found.items() if p.is_file()} == {0o600}


def test_a_folder_of_another_user_is_refused(tmp_path, monkeypatch, opened):
    filled(tmp_path / "kv")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(StoreError, match=r"belongs to uid .*choose another disk_path"):
        opened(tmp_path / "kv")


def test_a_folder_that_others_may_write_to_is_refused(tmp_path, opened):
    tmp_path.chmod(0o770)
    with pytest.raises(StoreError, match="chmod 700"):
        opened(tmp_path)


def test_a_file_in_place_of_the_folder_is_refused(tmp_path, opened):
    (tmp_path / "kv").write_text("")
    with pytest.raises(StoreError, match="is a file"):
        opened(tmp_path / "kv")
    with pytest.raises(StoreError, match="cannot write"):
        opened(tmp_path / "kv" / "below")


def test_files_of_others_are_left_alone(tmp_path, opened):
    notes = {"notes.txt": b"mine", "12-abc.tmp": b"also mine", "model.safetensors": b"mine too"}
    for name, data in notes.items():
        (tmp_path / name).write_bytes(data)
    tmp_path.chmod(0o700)
    store = opened(tmp_path)
    store.put(KEY, kv_of(1))
    assert store.forget("acme/docs") == 1
    store.close()
    assert {name: (tmp_path / name).read_bytes() for name in notes} == notes


ODD: dict[str, Callable[[Path], object]] = {
    "fifo": os.mkfifo,
    "link": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.timeout(30)
@pytest.mark.parametrize("odd", ["fifo", "link"])
def test_what_is_no_file_under_an_entrys_name_is_a_miss(tmp_path, odd, opened):
    path = tmp_path / "kv"
    filled(path)
    store = opened(path)
    file_of(path, key_of(1)).unlink()
    ODD[odd](file_of(path, key_of(1)))
    assert store.get(key_of(1)) is None
    assert store.open(key_of(1)) is None
    assert [holds(store, n) for n in (0, 2, 3)] == [True] * 3
    assert store.forget("acme/docs", frozenset(["chunk-2"])) >= 1
    store.close()
    again = opened(path)
    assert [holds(again, n) for n in range(4)] == [True, False, False, True]


def test_entries_and_their_order_of_use_survive_reopening(tmp_path, opened):
    path = tmp_path / "kv"
    filled(path)
    for number, age in enumerate((50, 10, 40, 20)):
        os.utime(file_of(path, key_of(number)), (1e9 - age, 1e9 - age))
    store = opened(path)
    assert holds(store, 0)
    store.close()
    smaller = opened(path, 2 * entry_size(path))
    assert left(smaller, 4) == [0, 1]
    assert smaller.stats()[0].evictions == 2
    assert agrees_with_files(smaller, path)


def test_room_is_made_before_writing(tmp_path, opened):
    """While an entry is written, the folder exceeds the budget by no more than that entry."""
    path, seen = tmp_path / "kv", list[int]()
    filled(path, entries=1)
    size = entry_size(path)
    store = opened(path, 3 * size)

    def watch(_):
        seen.append(sum(p.stat().st_size for p in path.iterdir() if p.suffix in (".tmp", ".safetensors")))

    with injected(Faults(path, 0, watch)):
        for number in range(8):
            assert store.put(key_of(number), kv_of(number))
        assert max(seen) <= 3 * size  # a new one has its room before
        assert store.put(key_of(7), kv_of(7))
    assert max(seen) <= 4 * size  # one that takes an older one's place is there beside it


def test_one_put_is_quick_though_half_of_a_large_folder_was_used(tmp_path):
    """Others wait for the folder meanwhile, and not for long."""
    names = [f"{0:032x}-{number:064x}.safetensors" for number in range(8_001)]
    begin = time.time_ns() - 10**12
    for number, name in enumerate(names[:-1]):
        (tmp_path / name).write_bytes(b"0123456789")
        os.utime(tmp_path / name, ns=(begin + number, begin + number))
    folder = EntryFolder(tmp_path, 80_000, {}, Counters("disk"))
    folder.prepare(5.0)
    for name in names[:4_000]:
        folder.record_use(name)
    before = time.thread_time()
    folder.put(names[-1], [memoryview(b"0123456789")])
    assert time.thread_time() - before < 1.0
    assert [name for name in names if not (tmp_path / name).exists()] == [names[4_000]]


@pytest.fixture
def size(tmp_path):
    filled(tmp_path / "probe", 1)
    return entry_size(tmp_path / "probe") + 64  # names of namespaces differ in length


def test_a_smaller_quota_is_enforced_at_the_next_start(tmp_path, size, opened):
    store = opened(tmp_path / "kv", 100 * size)
    for number in range(5):
        for namespace in ("small", "other"):
            assert store.put(key_of(number, namespace=namespace), kv_of(number))
    store.close()
    store = opened(tmp_path / "kv", 100 * size, quotas={"small": 2 * size})
    assert (left(store, 5, "small"), left(store, 5, "other")) == ([3, 4], [0, 1, 2, 3, 4])
    assert agrees_with_files(store, tmp_path / "kv")


def source_of(store, number=0):
    source = store.open(key_of(number))
    assert source is not None
    return source


def read(source):
    keys, values = zip(*map(source.layer, range(source.layers)), strict=True)
    return ChunkKV(keys, values, source.start, source.sums, source.quantised)


def test_layers_come_one_by_one_and_count_when_all_are_read(tmp_path, opened):
    store = opened(tmp_path / "kv")
    sums = {"attended": torch.arange(7.0)}
    made = kv_of(3, tokens=7, layers=5)
    kv = ChunkKV(made.keys, made.values, 9, sums, "int8")
    assert store.put(KEY, kv)
    source = store.open(KEY)
    assert isinstance(source, LayerSource)
    assert (source.tier, source.tokens, source.layers, source.start) == ("disk", 7, 5, 9)
    assert (source.nbytes, source.quantised, source.shapes) == (kv.nbytes - 7 * 4, "int8", kv.shapes)
    assert torch.equal(source.sums["attended"], sums["attended"])
    got = read(source)
    assert contents(got) == contents(kv)
    assert store.stats()[0].hits == 0
    source.finished(got)
    source.finished(got)
    assert (store.stats()[0].hits, store.stats()[0].misses) == (1, 0)
    source.close()
    source.close()
    with pytest.raises(OSError, match="Bad file"):
        source.layer(0)


def test_an_entry_that_is_forgotten_meanwhile_is_read_to_its_end(tmp_path, opened):
    filled(tmp_path / "kv", 1)
    store = opened(tmp_path / "kv")
    source = source_of(store)
    assert store.forget("acme/docs") == 1
    assert contents(read(source)) == contents(kv_of(0))


def test_damage_after_the_header_ends_the_reading_and_the_entry(tmp_path, opened):
    filled(tmp_path / "kv", 2)
    store, path = opened(tmp_path / "kv"), file_of(tmp_path / "kv", key_of(0))
    path.write_bytes(path.read_bytes()[:-3] + b"xyz")
    source = source_of(store)
    assert torch.equal(source.layer(0)[0], kv_of(0).keys[0])
    with pytest.raises(EntryDamaged, match="layer 1"):
        source.layer(1)
    source.close()
    assert not path.exists()
    stats = store.stats()[0]
    assert (stats.damaged, stats.misses, stats.hits, stats.entries) == (1, 1, 0, 1)


def test_a_damaged_file_goes_only_if_it_was_not_replaced(tmp_path, opened):
    path = tmp_path / "kv"
    filled(path)
    store, other = opened(path), opened(path)
    damaged = file_of(path, key_of(1))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\0")
    source = source_of(store, 1)
    assert other.put(key_of(1), kv_of(1))
    with pytest.raises(EntryDamaged):
        source.layer(source.layers - 1)
    source.close()
    assert store.stats()[0].damaged == 1
    assert holds(other, 1)
