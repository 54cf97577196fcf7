"""What every store promises, run over every store."""

import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from ragcachekit.config import StoreConfig
from ragcachekit.errors import StoreError
from ragcachekit.model.kv import ChunkKV
from ragcachekit.store.backends import FsspecStore
from ragcachekit.store.base import KVStore, NullStore
from ragcachekit.store.disk import DiskStore
from ragcachekit.store.memory import GpuStore, HostStore
from ragcachekit.store.tiered import TieredStore, open_store
from ragcachekit.types import KVKey
from redis_kit import KEY_BYTES, RedisServer, redis_store, running_server
from store_kit import KEY, contents, key_of, kv_of

BUDGET = 1 << 20
MAKERS: dict[str, Callable[[Path], KVStore]] = {
    "null": lambda path: NullStore(),
    "host": lambda path: HostStore(BUDGET),
    "disk": lambda path: DiskStore(path / "kv", BUDGET),
    "gpu": lambda path: GpuStore(BUDGET, "cpu"),
    "gpu, host and disk": lambda path: TieredStore(
        [GpuStore(BUDGET // 8, "cpu"), HostStore(BUDGET // 4), DiskStore(path / "kv", BUDGET)]
    ),
    "memory": lambda path: FsspecStore(f"memory://{path}", key=KEY_BYTES, deadline=20.0),
    "host and file": lambda path: TieredStore(
        [HostStore(BUDGET // 4), FsspecStore(path.as_uri(), key=KEY_BYTES, deadline=20.0)]
    ),
}

OTHER_IDENTITIES = [
    KVKey("weights-2", "acme/docs", "chunk-1", "sinks:4", ("system", "neighbour")),
    KVKey("", "acme/docs", "chunk-1", "sinks:4", ("system", "neighbour")),
    KVKey("weights-1a", "cme/docs", "chunk-1", "sinks:4", ("system", "neighbour")),
    KVKey("weights-1", "acme/mail", "chunk-1", "sinks:4", ("system", "neighbour")),
    KVKey("weights-1", "acme/docs2", "chunk-1", "sinks:4", ("system", "neighbour")),
    KVKey("weights-1", "Acme/docs", "chunk-1", "sinks:4", ("system", "neighbour")),
    KVKey("weights-1", "acme/docs", "chunk-2", "sinks:4", ("system", "neighbour")),
    KVKey("weights-1", "acme/docs", "chunk-1\0", "sinks:4", ("system", "neighbour")),
    KVKey("weights-1", "acme/docs", "chunk-1", "sinks:8", ("system", "neighbour")),
    KVKey("weights-1", "acme/docs", "chunk-1", "sinks:4@long", ("system", "neighbour")),
    KVKey("weights-1", "acme/docs", "chunk-1", "standalone", ("system", "neighbour")),
    KVKey("weights-1", "acme/docs", "chunk-1", "sinks:4", ("neighbour", "system")),
    KVKey("weights-1", "acme/docs", "chunk-1", "sinks:4", ("system",)),
    KVKey("weights-1", "acme/docs", "chunk-1", "sinks:4", ("systemneighbour",)),
    KVKey("weights-1", "acme/docs", "chunk-1", "sinks:4", ()),
]


@pytest.fixture(scope="module")
def server():
    with running_server() as running:
        yield running


def made(request, tmp_path):
    if request.param != "redis":
        return MAKERS[request.param](tmp_path)
    server: RedisServer = request.getfixturevalue("server")
    server.empty()
    return redis_store(server)


@pytest.fixture(params=[*MAKERS, "redis"])
def any_store(request, tmp_path):
    store = made(request, tmp_path)
    yield store
    store.close()


@pytest.fixture(params=[*(name for name in MAKERS if name != "null"), "redis"])
def store(request, tmp_path):
    store = made(request, tmp_path)
    yield store
    store.close()


@pytest.fixture(params=["host", "disk", "gpu", "gpu, host and disk"])
def bounded(request, tmp_path):
    """Stores that keep a budget of their own."""
    store = made(request, tmp_path)
    yield store
    store.close()


def test_unknown_key_is_a_counted_miss(any_store):
    assert any_store.get(KEY) is None
    assert KEY not in any_store
    assert [s.misses for s in any_store.stats()] == [1] * len(any_store.stats())
    assert any_store.forget("acme/docs") == 0


@pytest.mark.parametrize(("dtype", "start"), [(torch.float32, None), (torch.bfloat16, 17)])
def test_round_trip_is_byte_identical(store, dtype, start):
    kv = kv_of(1, dtype=dtype, start=start)
    assert store.put(KEY, kv)
    assert KEY in store
    found = store.get(KEY)
    assert contents(found.kv) == contents(kv)
    assert found.tier == store.stats()[0].tier


def test_last_put_under_a_key_wins_and_counts_once(store):
    store.put(KEY, kv_of(1, tokens=9))
    store.put(KEY, kv_of(2, tokens=3))
    alone = store.stats()
    store.put(KEY, kv_of(2, tokens=3))
    found = store.get(KEY)
    assert contents(found.kv) == contents(kv_of(2, tokens=3))
    if "redis" not in [s.tier for s in alone]:  # whose bytes are the server's
        assert [s.nbytes for s in store.stats()] == [s.nbytes for s in alone]
    assert {s.entries for s in store.stats() if s.tier != "bulk"} <= {1}


def test_fifteen_other_identities_never_hit(store):
    store.put(KEY, kv_of(1))
    assert [other for other in OTHER_IDENTITIES if other in store or store.get(other)] == []
    assert len({key.digest() for key in (KEY, *OTHER_IDENTITIES)}) == 16


def test_forget_follows_chunks_and_contexts_within_the_namespace(store):
    mine = key_of(1)
    behind = key_of(2, encoding="similar:1", context=("system", "chunk-1"))
    other = key_of(3)
    theirs = key_of(1, namespace="globex/docs")
    for key in (mine, behind, other, theirs):
        store.put(key, kv_of(1))
    assert store.forget("acme/docs", frozenset({"chunk-1"})) == 2
    assert [key in store for key in (mine, behind, other, theirs)] == [False, False, True, True]
    assert [store.get(key) is None for key in (mine, behind, other, theirs)] == [True, True, False, False]
    assert store.forget("acme/docs", frozenset()) == 0
    assert store.forget("acme/docs") == 1
    assert store.get(other) is None
    assert store.get(theirs) is not None


def test_forgetting_everything_frees_every_byte(bounded):
    for number in range(5):
        bounded.put(key_of(number), kv_of(number))
    assert bounded.forget("acme/docs") == 5
    assert {(s.entries, s.nbytes) for s in bounded.stats()} == {(0, 0)}


def test_entry_larger_than_the_budget_is_refused_and_harms_nobody(bounded):
    bounded.put(KEY, kv_of(1))
    huge = kv_of(2, tokens=BUDGET // 64)
    assert bounded.put(key_of(9), huge) is False
    assert bounded.get(key_of(9)) is None
    found = bounded.get(KEY)
    assert contents(found.kv) == contents(kv_of(1))
    assert {s.failed_writes for s in bounded.stats()} == {1}


def test_budget_holds_and_the_newest_stays(bounded):
    for number in range(60):
        key = key_of(number)
        assert bounded.put(key, kv_of(number, tokens=200 + number % 7))
        assert bounded.get(key) is not None
        assert all(s.nbytes <= s.budget for s in bounded.stats())
    slowest = bounded.stats()[-1]
    assert slowest.evictions == 60 - slowest.entries > 0


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_namespace_over_its_quota_loses_its_own_oldest(tmp_path, tier):
    make = HostStore if tier == "host" else partial(DiskStore, tmp_path / "kv")
    with closing(make(BUDGET)) as probe:
        probe.put(key_of(0, namespace="other"), kv_of(0))
        size = probe.stats()[0].nbytes
        probe.forget("other")
    store = make(100 * size, quotas={"small": 3 * size, "*": 5 * size})

    def left(namespace):
        return [n for n in range(8) if key_of(n, namespace=namespace) in store]

    for number in range(8):
        assert store.put(key_of(number, namespace="other"), kv_of(number))
    for number in range(3):
        assert store.put(key_of(number, namespace="small"), kv_of(number))
    assert store.get(key_of(0, namespace="small")) is not None
    assert store.put(key_of(3, namespace="small"), kv_of(3))
    assert (left("small"), left("other")) == ([0, 2, 3], [3, 4, 5, 6, 7])
    assert store.put(key_of(4, namespace="small"), kv_of(1, tokens=60)) is False
    assert left("small") == [0, 2, 3], "what is larger than its quota harms nobody"
    assert (store.stats()[0].evictions, store.stats()[0].failed_writes) == (4, 1)
    store.close()


def test_counters(store):
    store.put(KEY, kv_of(1))
    store.get(KEY)
    store.get(KEY)
    store.get(key_of(5))
    fastest = store.stats()[0]
    assert (fastest.hits, fastest.misses, fastest.damaged, fastest.failed_writes) == (2, 1, 0, 0)
    if fastest.tier != "bulk":  # which is not counted
        assert fastest.entries == 1
        assert fastest.nbytes >= kv_of(1).nbytes


def test_closed_store_misses(store):
    store.put(KEY, kv_of(1))
    store.close()
    assert store.get(KEY) is None
    assert store.put(KEY, kv_of(1)) is False
    assert KEY not in store
    assert store.forget("acme/docs") == 0
    assert len(store.stats()) >= 1
    store.close()


def test_sliced_and_transposed_tensors_are_kept_as_they_look(store):
    whole = kv_of(1, tokens=10, heads=4)
    from_batch = type(whole)(
        tuple(t.transpose(0, 1)[2:7].transpose(0, 1) for t in whole.keys),
        tuple(t[:, 2:7] for t in whole.values),
    )
    store.put(KEY, from_batch)
    found = store.get(KEY)
    assert contents(found.kv) == contents(from_batch)


def test_threads_see_a_value_or_a_miss(store):
    """Eight threads over the same keys, budget too small for all: nothing wrong, nothing raised."""
    wrong: list[object] = []

    def work(worker):
        try:
            for step in range(15):
                number = (worker * 7 + step * 3) % 10
                key, kv = key_of(number), kv_of(number, tokens=300)
                if step % 3 == 0:
                    store.put(key, kv)
                elif step == 7:
                    store.forget("acme/docs", frozenset({key.chunk_id}))
                found = store.get(key)
                if found is not None and contents(found.kv) != contents(kv):
                    wrong.append(key)
                if any(s.nbytes > s.budget > 0 for s in store.stats()):
                    wrong.append(store.stats())
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert sum(s.hits for s in store.stats()) > 0


def test_factory_opens_every_tier_in_order(tmp_path, monkeypatch):
    monkeypatch.setenv("SIGNING_KEY", "0" * 64)
    config = StoreConfig(
        host_bytes=BUDGET,
        disk_path=tmp_path / "kv",
        redis_url="redis://127.0.0.1:1/0",  # nobody listens: a miss, not an error
        bulk_url=f"file://{tmp_path}/bulk",
        remote_key="SIGNING_KEY",
        eviction="pgdsf",
        quantise={"bulk": "int8"},
    )
    store = open_store(config)
    assert [s.tier for s in store.stats()] == ["host", "disk", "redis", "bulk"]
    assert store.put(KEY, kv_of(1))
    assert [s.entries for s in store.stats()] == [1, 1, 0, 0]
    with pytest.raises(StoreError, match="the redis tier may hold what was to be forgotten"):
        store.forget("acme/docs")
    assert [s.entries for s in store.stats()] == [0, 0, 0, 0]
    store.close()
    store = open_store(replace(config, redis_url=None))
    assert [s.tier for s in store.stats()] == ["host", "disk", "bulk"]
    assert store.put(KEY, kv_of(1))
    found = store.get(KEY)
    assert contents(found.kv) == contents(kv_of(1))
    assert [s.entries for s in store.stats()] == [1, 1, 0]
    assert store.forget("acme/docs") == 2, "whole in two tiers, rounded in the third"
    assert [s.entries for s in store.stats()] == [0, 0, 0]
    store.close()


def test_what_one_tier_cannot_write_down_is_in_no_other(tmp_path):
    host = HostStore(1 << 20)
    store = TieredStore([host, DiskStore(tmp_path / "kv", BUDGET)])
    kv = kv_of(1)
    complex_kv = ChunkKV(tuple(k.to(torch.complex64) for k in kv.keys), kv.values)
    with pytest.raises(TypeError, match="cannot be stored"):
        store.put(KEY, complex_kv)
    assert KEY not in store
    assert host.stats()[0].entries == 0
    store.close()


def test_a_store_without_get_and_open_is_named() -> None:
    class Mine(KVStore):
        """Has neither."""

    for look_up in (Mine().get, Mine().open):
        with pytest.raises(NotImplementedError, match="Mine has neither get nor open"):
            look_up(KEY)
