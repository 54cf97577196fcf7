"""The loader by itself: order, sharing, failures, deadlines, prefetching, the end. No sleeps."""

import gc
import os
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from loading_kit import WAIT, Gate, SlowStore, Spoil, start
from ragcachekit.store import loader as loader_module
from ragcachekit.store.disk import DiskStore
from ragcachekit.store.entry import EntryDamaged
from ragcachekit.store.loader import Loader, LoadFailed, LoadingKV
from ragcachekit.store.memory import HostStore
from ragcachekit.store.tiered import TieredStore
from store_kit import contents, key_of, kv_of

LAYERS = 4


def filled(entries=3, before_read=lambda *_: None):
    store = SlowStore(before_read)
    for number in range(entries):
        assert store.put(key_of(number), kv_of(number, layers=LAYERS))
    return store


@pytest.fixture
def closing():
    loaders = []

    def made(store, **options):
        loaders.append(Loader(store, **options))
        return loaders[-1]

    yield made
    for loader in loaders:
        loader.close()


def opened(loader, *numbers):
    return [loader.open(key_of(number)).kv for number in numbers]


def same(loading, kv):
    assert isinstance(loading, LoadingKV)
    assert (loading.tokens, loading.layers, loading.start) == (kv.tokens, kv.layers, kv.start)
    layers = [loading.layer(number) for number in range(kv.layers)]
    ours, theirs = (
        [t for pair in layers for t in pair],
        [t for pair in zip(kv.keys, kv.values, strict=True) for t in pair],
    )
    return all(map(torch.equal, ours, theirs))


def test_layer_0_of_all_pieces_comes_first(closing):
    store = filled()
    loader = closing(store, threads=1)
    kvs = opened(loader, 0, 1, 2)
    assert store.log == []
    loader.begin(kvs)
    assert loader.flush(WAIT)
    assert [(key.chunk_id, layer) for key, layer in store.log] == [
        (f"chunk-{number}", layer) for layer in range(LAYERS) for number in range(3)
    ]


def test_earlier_requests_come_first_and_prefetches_last(closing):
    gate = Gate()
    store = filled(4, gate)
    loader = closing(store, threads=1)
    (first,) = opened(loader, 0)
    loader.begin([first])
    assert gate.reached.wait(WAIT)  # the one thread is in layer 0 of entry 0
    loader.prefetch([key_of(3)])
    second, third = opened(loader, 1), opened(loader, 2)
    loader.begin(second)
    loader.begin(third)
    gate.open()
    assert loader.flush(WAIT)
    assert [key.chunk_id for key, _ in store.log[::LAYERS]] == ["chunk-0", "chunk-1", "chunk-2", "chunk-3"]


def test_several_requests_read_an_entry_once(closing):
    gate = Gate()
    store = filled(before_read=gate)
    loader = closing(store)
    with ThreadPoolExecutor(8) as pool:
        kvs = list(pool.map(lambda _: start(loader, key_of(0)).kv, range(8)))
        gate.open()
        assert all(pool.map(lambda kv: same(kv, kv_of(0, layers=LAYERS)), kvs))
    assert loader.flush(WAIT)
    assert [layer for _, layer in store.log] == list(range(LAYERS))
    assert [key for key, _ in store.finished] == [key_of(0)]
    assert all(source.closed for source in store.sources)


@pytest.mark.parametrize("layer", [0, LAYERS - 1])
@pytest.mark.parametrize("error", [EntryDamaged("flipped"), OSError(5, "I/O"), RuntimeError("a bug")])
def test_a_layer_that_cannot_be_read(closing, layer, error, caplog):
    store = filled(before_read=Spoil(layer, error, lambda key: key == key_of(1)))
    loader = closing(store)
    kvs = opened(loader, 0, 1)
    loader.begin(kvs)
    with pytest.raises(LoadFailed) as failed:
        kvs[1].layer(layer)
    assert failed.value.keys == {key_of(1)}
    assert kvs[1].lost is not None
    assert kvs[1].ready == layer
    assert all(torch.equal(kvs[1].layer(i)[0], kv_of(1, layers=LAYERS).keys[i]) for i in range(layer))
    assert same(kvs[0], kv_of(0, layers=LAYERS))
    assert loader.flush(WAIT)
    assert [key for key, _ in store.finished] == [key_of(0)]
    assert all(source.closed for source in store.sources)
    assert bool(caplog.records) == isinstance(error, RuntimeError)


def test_what_is_not_there_in_time_is_lost(closing):
    gate = Gate(lambda key, layer: layer == 2)
    loader = closing(filled(before_read=gate), deadline=0.05)
    kv = start(loader, key_of(0)).kv
    with pytest.raises(LoadFailed, match=r"0\.05 s"):
        kv.layer(2)
    assert kv.lost == "not there within 0.05 s"
    assert kv.waited > 0
    gate.open()
    assert loader.flush(WAIT)
    assert kv.lost is None  # it came after all; the next request has it


def test_a_prefetch_ends_in_the_faster_tier_where_a_prompt_finds_it(closing):
    store, host = filled(), HostStore(1 << 20)
    loader = closing(TieredStore([host, store]))
    loader.prefetch([key_of(0), key_of(1), key_of(0), key_of(9)])
    assert loader.flush(WAIT)
    hit = start(loader, key_of(0))
    assert hit.tier == "host"
    assert contents(hit.kv) == contents(kv_of(0, layers=LAYERS))
    assert len(store.log) == 2 * LAYERS
    assert loader._active == []


def test_prefetching_keeps_within_its_bytes(closing):
    size, seen = kv_of(0, layers=LAYERS).nbytes, []
    store = filled(4, lambda *_: seen.append(sum(load.source.nbytes for load in loader._active)))
    loader = closing(store, threads=1, bytes_in_flight=size)
    loader.prefetch([key_of(n) for n in range(4)])
    assert loader.flush(WAIT)
    assert len(store.finished) == 4
    assert set(seen) == {size}


def test_forgotten_prefetches_are_not_handed_out(closing):
    gate = Gate(lambda key, layer: layer == 1)
    store = filled(before_read=gate)
    loader = closing(store)
    loader.prefetch([key_of(0), key_of(1)])
    assert gate.reached.wait(WAIT)
    loader.forget("acme/docs", frozenset(["chunk-1"]))
    opened(loader, 0, 1)
    assert len(store.sources) == 3, "0 is joined, 1 is opened anew"
    loader.forget("acme/docs")
    opened(loader, 0)
    assert len(store.sources) == 4
    gate.open()
    assert loader.flush(WAIT)
    assert store.finished == [], "what nobody may have is not read to its end"


def test_what_was_forgotten_while_it_was_opened_is_found_by_nobody(closing):
    store = filled()
    loader = closing(store)
    real = store.open

    def slow(key, weight=1.0):
        source = real(key, weight)
        loader.forget("acme/docs")
        return source

    store.open = slow
    mine = start(loader, key_of(0)).kv
    store.open = real
    other = start(loader, key_of(0)).kv
    assert len(store.sources) == 2
    assert same(mine, kv_of(0, layers=LAYERS))
    assert same(other, kv_of(0, layers=LAYERS))


def test_closing_while_others_wait(closing):
    gate = Gate(lambda key, layer: layer == 1)
    store = filled(before_read=gate)
    loader = closing(store, threads=1)
    kv = start(loader, key_of(0)).kv
    assert gate.reached.wait(WAIT)
    failures = []

    def wait():
        try:
            kv.layer(3)
        except LoadFailed as failed:
            failures.append(str(failed))

    waiting = threading.Thread(target=wait)
    waiting.start()
    closing_it = threading.Thread(target=loader.close)
    closing_it.start()
    waiting.join(WAIT)
    assert failures == ["the store was closed"]
    gate.open()
    closing_it.join(WAIT)
    assert not closing_it.is_alive()
    assert loader._pool._threads == set()
    assert loader.open(key_of(1)) is None
    loader.prefetch([key_of(1)])
    assert all(source.closed for source in store.sources)


def test_a_loader_that_is_dropped_ends_its_threads():
    store = filled()
    loader = Loader(store)
    handle = start(loader, key_of(0)).kv
    pool, gone = loader._pool, weakref.ref(loader)
    del loader, handle
    assert pool.flush(WAIT)
    for thread in list(pool._threads):
        thread.join(WAIT)
    gc.collect()
    assert gone() is None
    assert all(source.closed for source in store.sources)


def test_while_every_thread_hangs_slow_tiers_have_nothing(closing, monkeypatch):
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], perf_counter=time.perf_counter)
    monkeypatch.setattr(loader_module, "time", clock)
    reached, gate = threading.Semaphore(0), threading.Event()

    def before(key, _):
        if key == key_of(0) and not gate.is_set():
            reached.release()
            assert gate.wait(WAIT)

    store = filled(4, before)
    loader = closing(store, threads=2, deadline=WAIT)
    for _ in range(2):
        assert same(start(loader, key_of(2)).kv, kv_of(2, layers=LAYERS)), "there is another thread"
        kv = start(loader, key_of(0)).kv  # a new read of the same entry, not the one that hangs
        assert reached.acquire(timeout=WAIT)
        now[0] += 2 * WAIT
        with pytest.raises(LoadFailed, match="not there"):
            kv.layer(0)
    assert loader.open(key_of(3)) is None
    assert store.sources[-1].closed
    gate.set()
    assert loader.flush(WAIT)
    for number in (0, 3):
        assert same(start(loader, key_of(number)).kv, kv_of(number, layers=LAYERS))


def test_real_files_are_read_layer_by_layer(closing, tmp_path):
    disk = DiskStore(tmp_path, 1 << 20)
    for number in range(3):
        disk.put(key_of(number), kv_of(number, layers=LAYERS, start=number))
    reads = []
    loader = closing(disk, observe=lambda *read: reads.append(read))
    kvs = opened(loader, 0, 1, 2)
    loader.begin(kvs)
    assert all(same(kv, kv_of(number, layers=LAYERS, start=number)) for number, kv in enumerate(kvs))
    assert loader.flush(WAIT)
    assert len(reads) == 3 * LAYERS
    assert {read[:2] for read in reads} == {("disk", 512)}
    assert all(seconds > 0 and beside in (0, 512) for *_, seconds, beside in reads)
    assert disk.stats()[0].hits == 3
    disk.close()


@pytest.fixture
def store():
    return filled(8)


@pytest.fixture
def loader(store, closing):
    return closing(store)


def closed(store):
    return [source.closed for source in store.sources]


def test_the_file_of_a_dropped_handle_is_closed_with_the_next_call(store, loader):
    first, second = opened(loader, 0, 1)
    again = loader.open(key_of(0)).kv
    del first
    assert closed(store) == [False, False]
    del again
    assert loader.open(key_of(9)) is None
    assert closed(store) == [True, False]
    loader.release([second])
    assert closed(store) == [True, True]


def test_of_the_disk_no_descriptor_is_left(tmp_path, closing):
    def descriptors():
        names = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
        return sum(os.readlink(name).startswith(str(tmp_path)) for name in names if os.path.exists(name))

    disk = DiskStore(tmp_path, 1 << 20)
    assert all(disk.put(key_of(number), kv_of(number)) for number in range(3))
    loader = closing(disk)
    handles = opened(loader, 0, 1, 2)
    assert descriptors() == 3
    handles.clear()
    loader.release([])
    assert descriptors() == 0
