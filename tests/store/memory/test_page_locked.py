"""Page-locked entries: where their tensors lie, and what of the budget they take."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ragcachekit.model.kv import ChunkKV
from ragcachekit.model.packed import PackedKV
from ragcachekit.store import memory as host
from ragcachekit.store import memory as page_locked_module
from ragcachekit.store.memory import HostStore, give_back, in_slabs, slabs, taken, taken_by
from ragcachekit.store.quantised import QuantisedStore, pack
from store_kit import contents, key_of, kv_of


class Locked:
    """Stands for torch's host allocator: hands out ordinary memory, and writes down how much."""

    def __init__(self, limit: int = 1 << 40) -> None:
        self.asked: list[int] = []
        self.limit = limit

    def __call__(self, nbytes: int) -> torch.Tensor:
        if sum(self.asked) + nbytes > self.limit:
            raise RuntimeError("CUDA error: out of memory")
        self.asked.append(nbytes)
        return torch.full((nbytes,), 0xFF, dtype=torch.uint8)

    @property
    def rounded(self) -> int:
        """As CachingHostAllocatorImpl rounds: PowerOf2Ceil."""
        return sum(next(1 << n for n in range(64) if 1 << n >= size) for size in self.asked)


@pytest.fixture
def locked(monkeypatch: pytest.MonkeyPatch) -> Locked:
    locked = Locked()
    monkeypatch.setattr(page_locked_module, "page_locked", locked)
    return locked


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """As with a GPU; what was asked to be given back."""
    spared: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(host, "give_back", spared.append)
    return spared


def assert_in_stretches(kv: ChunkKV) -> None:
    """Keys, values and scales of a layer one behind the other, each at a multiple of 256 from its begin."""
    for layer in range(kv.layers):
        tensors = kv.stored_layer(layer)
        at = tensors[0].data_ptr()
        for tensor in tensors:
            assert tensor.data_ptr() == at
            assert tensor.is_contiguous()
            at += (tensor.nbytes + 255) // 256 * 256
        whole = kv.stretches[layer]
        assert whole is not None
        assert (whole.dtype, whole.data_ptr()) == (torch.uint8, tensors[0].data_ptr())
        assert whole.data_ptr() + whole.numel() == tensors[-1].data_ptr() + tensors[-1].nbytes


@pytest.mark.parametrize("kind", [None, "int8", "fp8"])
@pytest.mark.parametrize("tokens", [1, 4, 7])
def test_a_layer_is_one_stretch(locked: Locked, kind: str | None, tokens: int) -> None:
    plain = kv_of(1, tokens=tokens, layers=5, width=6, dtype=torch.bfloat16)
    kv = replace(plain, start=3, sums={"attended": torch.arange(tokens).float()})
    kv = kv if kind is None else pack(kv, kind)
    assert kv.stretches == (None,) * 5
    ours = in_slabs(kv)
    assert contents(ours) == contents(kv)
    assert set(ours.sums) == set(kv.sums)
    assert all(torch.equal(ours.sums[name], kv.sums[name]) for name in kv.sums)
    assert_in_stretches(ours)
    if kind is not None:
        lazy = PackedKV.of(ours, kind)
        assert lazy.stretches is ours.stretches


def test_neighbours_by_chance_are_no_stretch() -> None:
    """Two blocks of memory may lie next to each other; a copy over both would be out of bounds."""
    block = torch.zeros(2 * 256, dtype=torch.uint8)
    first = torch.frombuffer(block[:256].numpy(), dtype=torch.uint8).view(1, 16, 16)
    second = torch.frombuffer(block[256:].numpy(), dtype=torch.uint8).view(1, 16, 16)
    assert first.data_ptr() + 256 == second.data_ptr()
    assert ChunkKV((first,), (second,)).stretches == (None,)
    together = block.view(2, 1, 16, 16)
    assert ChunkKV((together[0],), (together[1],)).stretches[0] is not None
    assert ChunkKV((together[1],), (together[0],)).stretches == (None,)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 1 << 24), min_size=1, max_size=80))
def test_slabs_take_no_more_than_one_would(sizes: list[int]) -> None:
    counts = slabs(sizes)
    assert sum(counts) == len(sizes)
    assert min(counts) > 0
    parts = iter(sizes)
    took = sum(taken(sum(next(parts) for _ in range(count))) for count in counts)
    assert sum(sizes) <= took <= taken(sum(sizes))


@pytest.mark.parametrize("size", [2 << 20, (2 << 20) + 20480, 5 << 18, 3 << 20, (1 << 20) + 65536])
def test_little_is_wasted_on_entries_of_many_layers(size: int) -> None:
    sizes = [size] * 32
    parts = iter(sizes)
    took = sum(taken(sum(next(parts) for _ in range(count))) for count in slabs(sizes))
    assert took <= 1.1 * sum(sizes)
    assert len(slabs(sizes)) <= 4


@pytest.mark.parametrize("tokens", [3, 4, 5, 9])
def test_what_is_taken_counts(locked: Locked, cuda: list[int], tokens: int) -> None:
    store = HostStore(1 << 20, pinned=True)
    kv = replace(kv_of(1, tokens=tokens), sums={"attended": torch.zeros(tokens)})
    assert store.put(key_of(1), kv)
    assert store.stats()[0].nbytes == locked.rounded + 4 * tokens == taken_by(kv)
    assert store.stats()[0].nbytes >= kv.nbytes
    found = store.get(key_of(1))
    assert found is not None
    assert contents(found.kv) == contents(kv)
    assert_in_stretches(found.kv)
    assert "stretches" in vars(found.kv), "asked for when it came"


def test_the_budget_holds_for_what_is_taken(locked: Locked, cuda: list[int]) -> None:
    kv = kv_of(0, tokens=5)  # 2 x 5 x 8 floats are 320 bytes, which begin at multiples of 256
    took = taken(4 * 512)
    assert took > kv.nbytes
    store = HostStore(3 * took + took // 2, pinned=True, quotas={"small": took - 1})
    held = []
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
    locked.limit = 1024
    store = HostStore(1 << 20, pinned=True)
    for number in range(3):
        assert store.put(key_of(number), kv_of(number))
        found = store.get(key_of(number))
        assert found is not None
        assert contents(found.kv) == contents(kv_of(number))
    assert locked.asked == [1024]
    assert caplog.text.count("cannot page-lock") == 1
    assert store.stats()[0].nbytes == 3 * kv_of(0).nbytes


def test_rounded_entries_are_locked_with_their_scales(locked: Locked, cuda: list[int]) -> None:
    tier = HostStore(1 << 20, pinned=True)
    store, kv = QuantisedStore(tier, "int8"), kv_of(1, tokens=6)
    assert store.put(key_of(1), kv)
    (entry,) = tier._entries.values()
    assert_in_stretches(entry)
    assert len(entry.stored_layer(0)) == 4
    assert contents(entry) == contents(pack(kv, "int8"))


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
    kv = kv_of(1, tokens=700, layers=9, heads=5)
    ours = in_slabs(kv)
    grown = torch.cuda.host_memory_stats()["allocated_bytes.allocated"] - before
    assert grown <= taken_by(kv)
    assert all(tensor.is_pinned() for tensor in (*ours.keys, *ours.values, *ours.stretches))
    assert contents(ours) == contents(kv)
    give_back(1 << 40)
    give_back(0)
