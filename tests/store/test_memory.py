"""Memory tiers: quotas, who leaves first, who is handed down, whose memory is counted."""

import pytest
import torch

from ragcachekit.config import StoreConfig
from ragcachekit.model.kv import ChunkKV
from ragcachekit.store.base import KVStore
from ragcachekit.store.memory import GpuStore, HostStore, MemoryStore
from ragcachekit.store.tiered import TieredStore
from store_kit import contents, key_of, kv_of

ONE = kv_of(1).nbytes


def put(store, number, **changes):
    return store.put(key_of(number, **changes), kv_of(number))


def present(store, count):
    return [number for number in range(count) if key_of(number) in store]


def test_looking_is_no_use():
    store = HostStore(2 * ONE)
    put(store, 0)
    put(store, 1)
    assert store.open(key_of(0), 0.0) is not None
    assert store.open(key_of(9), 0.0) is None
    put(store, 2)
    assert present(store, 3) == [1, 2]
    assert (store.stats()[0].hits, store.stats()[0].misses) == (0, 0)


def test_an_entry_that_left_stays_with_who_has_it():
    store = HostStore(ONE)
    put(store, 0)
    held = [store.get(key_of(0))]
    assert store.put(key_of(0), kv_of(5))
    held.append(store.get(key_of(0)))
    assert put(store, 1)
    held.append(store.get(key_of(1)))
    assert store.forget("acme/docs") == 1
    assert [contents(found.kv) for found in held if found is not None] == [
        contents(kv_of(number)) for number in (0, 5, 1)
    ]


def test_a_hot_tier_takes_only_what_was_asked_for():
    gpu, host = GpuStore(2 * ONE, "cpu"), HostStore(100 * ONE)
    store = TieredStore([gpu, host], hot=1)
    for number in range(5):
        put(store, number)
    assert gpu.stats()[0].entries == 0
    first, second = store.get(key_of(3)), store.get(key_of(3))
    assert (first.tier, second.tier) == ("host", "gpu")
    assert store.put(key_of(3), kv_of(7))
    replaced = store.get(key_of(3))
    assert (replaced.tier, contents(replaced.kv)) == ("gpu", contents(kv_of(7)))


def test_a_device_without_memory_is_a_refusal(monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    gpu = GpuStore(10 * ONE, "meta")
    store = TieredStore([gpu, HostStore(10 * ONE)])
    monkeypatch.setattr(ChunkKV, "to", lambda kv, device: full() if str(device) == "meta" else kv)
    assert put(store, 1)
    assert gpu.stats()[0].failed_writes == 1
    found = store.get(key_of(1))
    assert found.tier == "host"


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"gpu_bytes": -1}, "gpu_bytes must be a finite number >= 0"),
        ({"redis_url": "redis://localhost"}, "remote_key="),
        ({"bulk_url": "memory://kv"}, "remote_key="),
        ({"quotas": {"acme": 0}}, "quota of namespace 'acme'"),
        ({"quantise": {"disk": "int3"}}, "cannot quantise tier 'disk' to 'int3'"),
        ({"quantise": {"tape": "int8"}}, "cannot quantise tier 'tape'"),
        ({"remote_deadline": 0}, "remote_deadline must be a finite number > 0"),
    ],
)
def test_configurations_that_cannot_work(wrong, says):
    with pytest.raises(ValueError, match=says):
        StoreConfig(**wrong)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_gpu_and_page_locked_host_memory():
    store = TieredStore([GpuStore(4 * ONE, "cuda"), HostStore(9 * ONE, pinned=True)], hot=1)
    put(store, 1)
    host, gpu = store.get(key_of(1)), store.get(key_of(1))
    assert host.kv.keys[0].is_pinned()
    assert gpu.kv.keys[0].is_cuda
    assert contents(gpu.kv.to("cpu")) == contents(kv_of(1))


def views(tokens, of=4000, start=None):
    """The first rows of large tensors, their sums included."""
    whole = kv_of(1, tokens=of)
    sums = {"attended": torch.arange(float(of))[:tokens]}
    return ChunkKV(
        tuple(k[:, :tokens] for k in whole.keys), tuple(v[:, :tokens] for v in whole.values), start, sums
    )


def held(kv):
    tensors = (*kv.keys, *kv.values, *kv.sums.values())
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


@pytest.mark.parametrize(
    "make",
    [lambda: HostStore(1 << 24), lambda: GpuStore(1 << 24, "cpu"), lambda: MemoryStore("any", 1 << 24)],
)
def test_views_are_copied_and_what_is_counted_is_what_is_held(make):
    store: KVStore = make()
    for number in range(20):
        assert store.put(key_of(number), views(10))
    kept = [store.get(key_of(number)) for number in range(20)]
    assert all(found is not None and contents(found.kv) == contents(views(10)) for found in kept)
    assert sum(held(found.kv) for found in kept if found is not None) == store.stats()[0].nbytes
    assert store.stats()[0].nbytes == 20 * views(10).nbytes
    assert all(torch.equal(f.kv.sums["attended"], torch.arange(10.0)) for f in kept if f is not None)


def test_what_is_compact_is_kept_by_reference_and_counted_whole():
    store, kv = HostStore(1 << 24), kv_of(1, tokens=100)
    assert store.put(key_of(1), kv)
    found = store.get(key_of(1))
    assert found.kv.keys[0] is kv.keys[0]
    nearly = views(3900)
    assert store.put(key_of(2), nearly)
    assert store.stats()[0].nbytes == kv.nbytes + held(nearly)
