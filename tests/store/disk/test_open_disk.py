"""The disk tier opened without waiting: layer by layer, by several threads."""

from __future__ import annotations

import errno
import gc
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from ragcachekit.model.kv import ChunkKV
from ragcachekit.store import entry as entry_file
from ragcachekit.store.base import Found, LayerSource
from ragcachekit.store.disk import DiskStore
from ragcachekit.store.entry import Buffers, EntryDamaged
from ragcachekit.store.memory import HostStore
from ragcachekit.store.tiered import TieredStore
from store_kit import KEY, contents, failing, file_of, filled, holds, key_of, kv_of, opened


def source_of(store: DiskStore, number: int = 0) -> LayerSource:
    source = store.open(key_of(number))
    assert source is not None
    return source


def read(source: LayerSource) -> ChunkKV:
    pairs = [source.layer(number) for number in range(source.layers)]
    keys, values = zip(*pairs, strict=True)
    return ChunkKV(keys, values, source.start, source.sums, source.quantised)


def test_layers_come_one_by_one_and_count_when_all_are_read(tmp_path: Path) -> None:
    store = opened(tmp_path / "kv")
    sums = {"attended": torch.arange(7.0)}
    made = kv_of(3, tokens=7, layers=5)
    kv = ChunkKV(made.keys, made.values, 9, sums, "int8")
    assert store.put(KEY, kv)
    source = store.open(KEY)
    assert isinstance(source, LayerSource)
    assert (source.tier, source.tokens, source.layers, source.start) == ("disk", 7, 5, 9)
    assert (source.nbytes, source.quantised) == (kv.nbytes - 7 * 4, "int8")
    assert torch.equal(source.sums["attended"], sums["attended"])
    got = read(source)
    assert contents(got) == contents(kv)
    described = tuple(
        ((k.dtype, tuple(k.shape)), (v.dtype, tuple(v.shape)))
        for k, v in zip(kv.keys, kv.values, strict=True)
    )
    assert source.shapes == described
    assert store.stats()[0].hits == 0
    source.finished(got)
    source.finished(got)
    assert (store.stats()[0].hits, store.stats()[0].misses) == (1, 0)
    source.close()
    source.close()
    with pytest.raises(OSError, match="Bad file"):
        source.layer(0)
    found = store.get(KEY)
    assert found is not None
    assert (found.kv.quantised, found.kv.start) == ("int8", 9)
    assert contents(found.kv) == contents(kv)
    store.close()


def test_what_is_closed_early_is_neither_hit_nor_miss_and_stays(tmp_path: Path) -> None:
    filled(tmp_path / "kv", 1)
    store = opened(tmp_path / "kv")
    source = source_of(store)
    source.layer(0)
    source.close()
    assert (store.stats()[0].hits, store.stats()[0].misses) == (0, 0)
    assert store.open(key_of(9)) is None
    assert store.stats()[0].misses == 1
    assert holds(store, 0)
    store.close()


def test_damage_behind_the_header_ends_the_reading_and_the_entry(tmp_path: Path) -> None:
    filled(tmp_path / "kv", 2)
    store = opened(tmp_path / "kv")
    path = file_of(tmp_path / "kv", key_of(0))
    data = path.read_bytes()
    path.write_bytes(data[:-3] + b"xyz")
    source = source_of(store)
    keys, _ = source.layer(0)
    assert torch.equal(keys, kv_of(0).keys[0])
    with pytest.raises(EntryDamaged, match="layer 1"):
        source.layer(1)
    source.close()
    assert not path.exists()
    stats = store.stats()[0]
    assert (stats.damaged, stats.misses, stats.hits, stats.entries) == (1, 1, 0, 1)
    store.close()


def test_a_medium_that_fails_while_layers_are_read_keeps_the_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(tmp_path / "kv", 1)
    store = opened(tmp_path / "kv")
    source = source_of(store)
    with monkeypatch.context() as patch:
        patch.setattr(entry_file, "read_into", failing(errno.EIO))
        with pytest.raises(OSError, match="Input/output"):
            source.layer(0)
    source.close()
    assert store.stats()[0].damaged == 0
    assert holds(store, 0)
    store.close()


def test_an_entry_that_is_evicted_meanwhile_is_read_to_its_end(tmp_path: Path) -> None:
    filled(tmp_path / "kv", 1)
    store = opened(tmp_path / "kv")
    source = source_of(store)
    assert store.forget("acme/docs") == 1
    assert contents(read(source)) == contents(kv_of(0))
    source.close()
    store.close()


def test_a_composed_store_promotes_what_was_read(tmp_path: Path) -> None:
    filled(tmp_path / "kv", 1)
    store = TieredStore([HostStore(1 << 20), opened(tmp_path / "kv")])
    source = store.open(key_of(0))
    assert isinstance(source, LayerSource)
    source.finished(read(source))
    source.close()
    again = store.open(key_of(0))
    assert isinstance(again, Found)
    assert again.tier == "host"
    assert contents(again.kv) == contents(kv_of(0))
    store.close()


def test_threads_read_the_same_and_other_entries_at_once(tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "kv", 1 << 30)
    made = [kv_of(number, tokens=3000 + 7 * number, layers=3) for number in range(3)]
    for number, kv in enumerate(made):
        assert store.put(key_of(number), kv)
    expected = [contents(kv) for kv in made]
    wrong: list[object] = []

    def work(worker: int) -> None:
        try:
            for step in range(6):
                number = (worker + step) % 3
                source = source_of(store, number)
                if contents(read(source)) != expected[number]:
                    wrong.append((worker, step))
                source.close()
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    store.close()


def test_memory_is_used_again_only_when_nobody_holds_it(tmp_path: Path) -> None:
    """One after the other, keeping every third: recycled memory never shows through in what is held."""
    store = DiskStore(tmp_path / "kv", 1 << 30)
    made = [kv_of(number, tokens=4000, layers=2) for number in range(4)]
    for number, kv in enumerate(made):
        assert store.put(key_of(number), kv)
    held = []
    for step in range(24):
        found = store.get(key_of(step % 4))
        assert found is not None
        if step % 3 == 0:
            held.append((step % 4, found.kv.keys[1]))  # one tensor keeps the memory of all
        del found
    assert all(torch.equal(keys, made[number].keys[1]) for number, keys in held)
    store.close()
    assert all(torch.equal(keys, made[number].keys[1]) for number, keys in held)


def test_buffers_come_back_and_are_bounded() -> None:
    buffers = Buffers(idle=3 << 20)
    first = buffers.take(1 << 20)
    where, part = first.data_ptr(), first[4:8].view(torch.float32)
    del first
    gc.collect()
    second = buffers.take(1 << 20)
    assert second.data_ptr() != where, "a view still holds the first"
    del part
    third = buffers.take((1 << 20) - 5000)
    assert third.data_ptr() == where
    assert third.numel() == (1 << 20) - 5000
    assert buffers.take(1 << 19).data_ptr() not in (where, second.data_ptr())
    many = [buffers.take(1 << 20) for _ in range(6)]
    places = {tensor.data_ptr() for tensor in many}
    assert len(places) == 6
    del many
    buffers.take(1)
    again = [buffers.take(1 << 20) for _ in range(6)]
    assert len(again) == 6
    assert sum(map(len, buffers._free)) <= 3 << 20
    buffers.clear()
    assert buffers._free == []


FORKS = """
import os
import torch
from ragcachekit.store.entry import Buffers

torch.set_num_threads(1)  # the threads of a pool do not exist in the child
buffers = Buffers(idle=8 << 20)
kept = buffers.take(1 << 20)
kept.fill_(1)
pid = os.fork()
if pid == 0:
    kept.fill_(2)
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
assert bool((kept == 1).all()), "written to by the child"
print("apart")
"""


def test_a_forked_child_has_memory_of_its_own() -> None:
    """In a process of its own: it forks, which pytest with its threads must not."""
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("apart\n", 0), done.stderr


@pytest.mark.parametrize("tokens", [(40, 37), (9000, 8900)])
def test_an_entry_keeps_no_more_memory_than_it_counts(tokens: tuple[int, int], tmp_path: Path) -> None:
    """Read into memory of a slightly larger one; below a page per piece."""
    store = DiskStore(tmp_path / "kv", 1 << 30)
    for number, count in enumerate(tokens):
        assert store.put(key_of(number), kv_of(number, tokens=count))
    for number in range(2):
        found = None  # the first lets go of its memory
        found = store.get(key_of(number))
        assert found is not None
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage() for t in (*found.kv.keys, *found.kv.values)
    }
    held = sum(storage.nbytes() for storage in storages.values())
    pages = 0 if found.kv.nbytes < 1 << 18 else len(storages)
    assert found.kv.nbytes <= held <= found.kv.nbytes + 4096 * pages
    store.close()


def test_short_reads_go_on_where_they_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DiskStore(tmp_path / "kv", 1 << 30)
    made = kv_of(1, tokens=5000)
    assert store.put(KEY, made)
    real = os.preadv
    with monkeypatch.context() as patch:
        patch.setattr(entry_file.os, "preadv", lambda fd, views, at: real(fd, [views[0][:5000]], at))
        found = store.get(KEY)
    assert found is not None
    assert contents(found.kv) == contents(made)
    store.close()
