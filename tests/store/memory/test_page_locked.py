"""Page-locked entries of the host tier: what of the budget they take, and what happens without them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ragcachekit.model.kv import ChunkKV
from ragcachekit.store import memory
from ragcachekit.store.memory import HostStore, give_back, pinned_bytes
from ragcachekit.store.quantised import QuantisedStore, pack
from store_kit import contents, key_of, kv_of


class Locked:
    """Stands for torch's host allocator: copies into ordinary memory, and writes down how much."""

    def __init__(self, limit: int = 1 << 40) -> None:
        self.asked: list[int] = []
        self.limit = limit

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        if sum(self.asked) + tensor.nbytes > self.limit:
            raise RuntimeError("CUDA error: out of memory")
        self.asked.append(tensor.nbytes)
        return tensor.clone()

    @property
    def rounded(self) -> int:
        """As CachingHostAllocatorImpl rounds: PowerOf2Ceil."""
        return sum(next(1 << n for n in range(64) if 1 << n >= size) for size in self.asked)


@pytest.fixture
def locked(monkeypatch: pytest.MonkeyPatch) -> Locked:
    locked = Locked()
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: locked.pin(tensor))
    return locked


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """As with a GPU; what was asked to be given back."""
    spared: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(memory, "give_back", spared.append)
    return spared


@pytest.mark.parametrize("tokens", [3, 4, 5, 9])
def test_what_torch_takes_counts(locked: Locked, cuda: list[int], tokens: int) -> None:
    store = HostStore(1 << 20, pinned=True)
    kv = replace(kv_of(1, tokens=tokens), sums={"attended": torch.zeros(tokens)})
    assert store.put(key_of(1), kv)
    assert store.stats()[0].nbytes == locked.rounded + 4 * tokens == pinned_bytes(kv)
    assert store.stats()[0].nbytes >= kv.nbytes
    found = store.get(key_of(1))
    assert found is not None
    assert contents(found.kv) == contents(kv)


def test_the_budget_holds_for_what_is_taken(locked: Locked, cuda: list[int]) -> None:
    kv = kv_of(0, tokens=5)
    took = pinned_bytes(kv)
    assert took > kv.nbytes
    store = HostStore(3 * took + took // 2, pinned=True, quotas={"small": took - 1})
    for number in range(5):
        assert store.put(key_of(number), kv_of(number, tokens=5))
        assert store.stats()[0].nbytes <= 3 * took
    assert [n for n in range(5) if key_of(n) in store] == [2, 3, 4]
    assert cuda == [took, took], "after those that evicted; one entry may stay for the next"
    held = [store.get(key_of(number)) for number in (2, 3, 4)]
    before = len(locked.asked)
    assert not store.put(key_of(9), kv_of(9, tokens=5)), "as taken, what is in use leaves no room"
    assert not store.put(key_of(9, namespace="small"), kv_of(9, tokens=5))
    assert len(locked.asked) == before, "nothing is page-locked for what is refused"
    held.clear()
    assert store.put(key_of(9), kv_of(9, tokens=5))


def test_goes_on_without_when_there_is_none_left(
    locked: Locked, cuda: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    locked.limit = kv_of(0).nbytes
    store = HostStore(1 << 20, pinned=True)
    for number in range(3):
        assert store.put(key_of(number), kv_of(number))
        found = store.get(key_of(number))
        assert found is not None
        assert contents(found.kv) == contents(kv_of(number))
    assert caplog.text.count("cannot page-lock") == 1


def test_rounded_entries_are_locked_with_their_scales(locked: Locked, cuda: list[int]) -> None:
    tier = HostStore(1 << 20, pinned=True)
    store, kv = QuantisedStore(tier, "int8"), kv_of(1, tokens=6)
    assert store.put(key_of(1), kv)
    packed: ChunkKV = pack(kv, "int8")
    assert sorted(locked.asked) == sorted(
        t.nbytes for i in range(packed.layers) for t in packed.stored_layer(i)
    )


@pytest.mark.parametrize(("active", "emptied"), [(900, 0), (800, 0), (799, 1)])
def test_torch_keeps_only_what_is_spared(monkeypatch: pytest.MonkeyPatch, active: int, emptied: int) -> None:
    calls: list[int] = []
    stats = {"allocated_bytes.current": 1000, "active_bytes.current": active}
    monkeypatch.setattr(torch.cuda, "host_memory_stats", lambda: stats)
    monkeypatch.setattr(torch.accelerator, "empty_host_cache", lambda: calls.append(1), raising=False)
    give_back(200)
    assert len(calls) == emptied
    del stats["active_bytes.current"]
    give_back(0)
    assert len(calls) == emptied, "a version that does not tell"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_a_gpu() -> None:
    before = torch.cuda.host_memory_stats()["allocated_bytes.allocated"]
    store, kv = HostStore(1 << 30, pinned=True), kv_of(1, tokens=700, layers=9, heads=5)
    assert store.put(key_of(1), kv)
    grown = torch.cuda.host_memory_stats()["allocated_bytes.allocated"] - before
    assert grown <= pinned_bytes(kv)
    found = store.get(key_of(1))
    assert found is not None
    assert all(tensor.is_pinned() for tensor in (*found.kv.keys, *found.kv.values))
    assert contents(found.kv) == contents(kv)
