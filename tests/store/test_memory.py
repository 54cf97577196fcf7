"""Memory tiers: what is in use stays, quotas, who leaves first, who is handed down."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ragcachekit.config import StoreConfig
from ragcachekit.model.kv import ChunkKV
from ragcachekit.prefix_tree.knowledge_tree import KnowledgeTree
from ragcachekit.prefix_tree.nodes import Root, Step
from ragcachekit.store.base import Found, KVStore
from ragcachekit.store.disk import DiskStore
from ragcachekit.store.factory import open_store
from ragcachekit.store.memory import GpuStore, HostStore, MemoryStore
from ragcachekit.store.tiered import TieredStore
from ragcachekit.types import KVKey
from store_kit import KEY, contents, key_of, kv_of

ONE = kv_of(1).nbytes


def put(store: HostStore | TieredStore, number: int, **changes: object) -> bool:
    return store.put(key_of(number, **changes), kv_of(number))


def present(store: HostStore | TieredStore, count: int) -> list[int]:
    return [number for number in range(count) if key_of(number) in store]


def test_what_a_caller_holds_is_not_evicted() -> None:
    store = HostStore(3 * ONE)
    for number in range(3):
        put(store, number)
    held = store.get(key_of(0))
    for number in range(3, 6):
        assert put(store, number)
    assert present(store, 6) == [0, 4, 5]
    del held
    assert put(store, 6)
    assert put(store, 7)
    assert present(store, 8) == [5, 6, 7]


def test_looking_is_no_use() -> None:
    store = HostStore(2 * ONE)
    put(store, 0)
    put(store, 1)
    assert store.open(key_of(0), 0.0) is not None
    assert store.open(key_of(9), 0.0) is None
    put(store, 2)
    assert present(store, 3) == [1, 2]
    assert (store.stats()[0].hits, store.stats()[0].misses) == (0, 0)


def test_two_holders_of_one_entry_and_the_first_lets_go() -> None:
    store = HostStore(2 * ONE)
    put(store, 0)
    first, second = store.get(key_of(0)), store.get(key_of(0))
    del first
    for number in range(1, 5):
        assert put(store, number)
    assert present(store, 5) == [0, 4]
    assert second is not None
    assert contents(second.kv) == contents(kv_of(0))


def test_a_put_that_needs_what_is_in_use_is_refused_and_evicts_nobody() -> None:
    store = HostStore(3 * ONE)
    for number in range(3):
        put(store, number)
    held = [store.get(key_of(number)) for number in (0, 1)]
    large = kv_of(9, tokens=8)
    assert large.nbytes == 2 * ONE
    assert store.put(key_of(9), large) is False
    assert present(store, 10) == [0, 1, 2]
    assert store.stats()[0].failed_writes == 1
    held.clear()
    assert store.put(key_of(9), large)


def test_an_entry_replaced_or_forgotten_while_held_leaves_the_holder_its_own() -> None:
    store = HostStore(2 * ONE)
    put(store, 0)
    held = store.get(key_of(0))
    assert held is not None
    assert store.put(key_of(0), kv_of(5))
    now = store.get(key_of(0))
    assert now is not None
    assert contents(now.kv) == contents(kv_of(5))
    assert contents(held.kv) == contents(kv_of(0))
    del now
    assert store.forget("acme/docs") == 1
    assert contents(held.kv) == contents(kv_of(0))
    assert put(store, 1)
    assert put(store, 2)
    del held
    assert present(store, 3) == [1, 2]


def test_a_namespace_over_its_quota_evicts_its_own() -> None:
    store = HostStore(10 * ONE, quotas={"globex": 2 * ONE, "*": 4 * ONE})
    for number in range(3):
        assert put(store, number)
    for number in range(5):
        assert put(store, number, namespace="globex")
    assert present(store, 3) == [0, 1, 2]
    assert [n for n in range(5) if key_of(n, namespace="globex") in store] == [3, 4]
    for number in range(3, 6):
        put(store, number)
    assert present(store, 6) == [2, 3, 4, 5]
    assert store.put(key_of(9, namespace="globex"), kv_of(1, tokens=12)) is False
    assert [n for n in range(5) if key_of(n, namespace="globex") in store] == [3, 4]


def test_a_gpu_tier_hands_its_evicted_to_the_host_once() -> None:
    gpu, host = GpuStore(2 * ONE, "cpu"), HostStore(100 * ONE)
    puts: list[KVKey] = []
    admit = host.admit

    def counted(key: KVKey, kv: ChunkKV):  # type: ignore[no-untyped-def]
        puts.append(key)
        return admit(key, kv)

    host.admit = counted  # type: ignore[method-assign]
    store = TieredStore([gpu, host])
    for number in range(3):
        gpu.put(key_of(number), kv_of(number))
    assert puts == []
    for number in range(3, 6):
        store.put(key_of(number), kv_of(number))
    handed_down = [key for key in puts if key in (key_of(1), key_of(2))]
    assert sorted(handed_down, key=str) == [key_of(1), key_of(2)]
    before = len(puts)
    for number in (1, 2, 3, 4, 5, 1, 2):
        found = store.get(key_of(number))
        assert found is not None
        assert contents(found.kv) == contents(kv_of(number))
    assert len(puts) == before, "later evictions only free"


def test_a_hot_tier_takes_only_what_was_asked_for() -> None:
    gpu, host = GpuStore(2 * ONE, "cpu"), HostStore(100 * ONE)
    store = TieredStore([gpu, host], hot=1)
    for number in range(5):
        put(store, number)
    assert gpu.stats()[0].entries == 0
    first, second = store.get(key_of(3)), store.get(key_of(3))
    assert isinstance(first, Found)
    assert isinstance(second, Found)
    assert (first.tier, second.tier) == ("host", "gpu")
    assert store.put(key_of(3), kv_of(7))
    replaced = store.get(key_of(3))
    assert replaced is not None
    assert (replaced.tier, contents(replaced.kv)) == ("gpu", contents(kv_of(7)))


def test_a_device_without_memory_is_a_refusal() -> None:
    class Full(GpuStore):
        def _placed(self, kv: ChunkKV) -> ChunkKV:
            raise torch.OutOfMemoryError("CUDA out of memory")

    gpu = Full(10 * ONE, "cpu")
    store = TieredStore([gpu, HostStore(10 * ONE)])
    assert put(store, 1)
    assert gpu.stats()[0].failed_writes == 1
    found = store.get(key_of(1))
    assert found is not None
    assert found.tier == "host"


@pytest.mark.parametrize("drop", ["gpu", "host", "disk"])
def test_forget_reaches_every_tier(drop: str, tmp_path: Path) -> None:
    tiers = {
        "gpu": GpuStore(9 * ONE, "cpu"),
        "host": HostStore(9 * ONE),
        "disk": DiskStore(tmp_path / "kv", 1 << 20),
    }
    store = TieredStore(list(tiers.values()))
    tiers[drop].put(KEY, kv_of(1))
    assert store.forget("acme/docs", frozenset({"chunk-1"})) == 1
    assert KEY not in store
    store.close()


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
def test_configurations_that_cannot_work(wrong: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        StoreConfig(**wrong)  # type: ignore[arg-type]


class HoldingMachine(RuleBasedStateMachine):
    """Callers hold what they got for a while; a dict knows what was put and what may have left."""

    budget = 6 * ONE
    quota = 3 * ONE

    @initialize()
    def start(self) -> None:
        self.store = HostStore(self.budget, quotas={"globex": self.quota})
        self.model: dict[KVKey, int] = {}
        self.puts = 0
        self.held: list[tuple[KVKey, int, Found]] = []

    keys = st.builds(
        lambda n, namespace: key_of(n, namespace=namespace),
        st.integers(0, 7),
        st.sampled_from(["acme", "globex"]),
    )

    @rule(key=keys, size=st.integers(1, 3))
    def put(self, key: KVKey, size: int) -> None:
        self.puts += 1
        seed = self.puts
        in_use = {k: f.kv.nbytes for k, s, f in self.held if k != key and self.model.get(k) == s}
        kv = kv_of(seed, tokens=4 * size)
        fits = sum(in_use.values()) + kv.nbytes <= self.budget
        if key.namespace == "globex":
            own = sum(n for k, n in in_use.items() if k.namespace == "globex")
            fits = fits and own + kv.nbytes <= self.quota
        kept = self.store.put(key, kv)
        assert kept is fits
        if kept:
            self.model[key] = seed * 10 + size
            assert key in self.store

    @rule(key=keys, hold=st.booleans())
    def get(self, key: KVKey, hold: bool) -> None:
        found = self.store.get(key)
        if found is None:
            return
        expected = self.model[key]
        assert contents(found.kv) == contents(kv_of(expected // 10, tokens=4 * (expected % 10)))
        if hold:
            self.held.append((key, expected, found))

    @rule(which=st.integers(0, 5))
    def let_go(self, which: int) -> None:
        if self.held:
            self.held.pop(which % len(self.held))

    @rule(namespace=st.sampled_from(["acme", "globex"]), number=st.integers(0, 7))
    def forget(self, namespace: str, number: int) -> None:
        self.store.forget(namespace, frozenset({f"chunk-{number}"}))
        self.model.pop(key_of(number, namespace=namespace), None)

    @invariant()
    def holders_keep_theirs(self) -> None:
        for key, expected, found in getattr(self, "held", ()):
            assert contents(found.kv) == contents(kv_of(expected // 10, tokens=4 * (expected % 10)))
            if self.model.get(key) == expected:
                assert key in self.store, "in use, yet evicted"

    @invariant()
    def within_limits(self) -> None:
        if hasattr(self, "store"):
            assert self.store.stats()[0].nbytes <= self.budget
            mine = [k for k in self.model if k.namespace == "globex" and k in self.store]
            sizes = [kv_of(0, tokens=4 * (self.model[k] % 10)).nbytes for k in mine]
            assert sum(sizes) <= self.quota


TestHoldingMachine = HoldingMachine.TestCase
TestHoldingMachine.settings = settings(
    max_examples=40,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_gpu_and_page_locked_host_memory() -> None:
    store = TieredStore([GpuStore(4 * ONE, "cuda"), HostStore(9 * ONE, pinned=True)], hot=1)
    put(store, 1)
    host, gpu = store.get(key_of(1)), store.get(key_of(1))
    assert host is not None
    assert gpu is not None
    assert host.kv.keys[0].is_pinned()
    assert gpu.kv.keys[0].is_cuda
    assert contents(gpu.kv.to("cpu")) == contents(kv_of(1))


def test_a_window_of_time_from_the_configuration(monkeypatch) -> None:
    """Popular an hour ago and used once since: that counts less than two uses just now."""
    now = [0.0]
    monkeypatch.setattr("ragcachekit.store.eviction.time", SimpleNamespace(monotonic=lambda: now[0]))
    left = {}
    for eviction in ("lfu:600s", "lfu:10000"):
        now[0] = 0.0
        store = open_store(StoreConfig(host_bytes=2 * ONE, eviction=eviction))
        put(store, 0)
        for _ in range(9):
            assert store.get(key_of(0)) is not None
        now[0] = 3600.0
        assert store.get(key_of(0)) is not None
        put(store, 1)
        assert store.get(key_of(1)) is not None
        put(store, 2)
        left[eviction] = present(store, 3)
        store.close()
    assert left == {"lfu:600s": [1, 2], "lfu:10000": [0, 2]}


# -- views of large tensors -------------------------------------------------------------------------------


def views(tokens: int, of: int = 4000, start: int | None = None) -> ChunkKV:
    """The first rows of large tensors, their sums included."""
    whole = kv_of(1, tokens=of)
    sums = {"attended": torch.arange(float(of))[:tokens]}
    return ChunkKV(
        tuple(k[:, :tokens] for k in whole.keys), tuple(v[:, :tokens] for v in whole.values), start, sums
    )


def held(kv: ChunkKV) -> int:
    tensors = (*kv.keys, *kv.values, *kv.sums.values())
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


@pytest.mark.parametrize(
    "make",
    [lambda: HostStore(1 << 24), lambda: GpuStore(1 << 24, "cpu"), lambda: MemoryStore("any", 1 << 24)],
)
def test_views_are_copied_and_what_is_counted_is_what_is_held(make) -> None:
    store: KVStore = make()
    for number in range(20):
        assert store.put(key_of(number), views(10))
    kept = [store.get(key_of(number)) for number in range(20)]
    assert all(found is not None and contents(found.kv) == contents(views(10)) for found in kept)
    assert sum(held(found.kv) for found in kept if found is not None) == store.stats()[0].nbytes
    assert store.stats()[0].nbytes == 20 * views(10).nbytes
    assert all(torch.equal(f.kv.sums["attended"], torch.arange(10.0)) for f in kept if f is not None)


def test_what_is_compact_is_kept_by_reference_and_counted_whole() -> None:
    store, kv = HostStore(1 << 24), kv_of(1, tokens=100)
    assert store.put(key_of(1), kv)
    found = store.get(key_of(1))
    assert found is not None
    assert found.kv.keys[0] is kv.keys[0]
    nearly = views(3900)
    assert store.put(key_of(2), nearly)
    assert store.stats()[0].nbytes == kv.nbytes + held(nearly)


def test_the_tree_owns_its_nodes() -> None:
    tree = KnowledgeTree(host_bytes=1 << 24)
    match = tree.match(Root("weights", "space"), [Step(("chunk",), 10)])
    assert tree.insert(match, [views(10, start=0)], new=10) == 1
    (reused,) = tree.match(match.root, match.path).found
    assert held(reused.kv) == reused.kv.nbytes == views(10).nbytes
