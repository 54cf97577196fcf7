"""KV in eight bits looks unpacked to everybody but the assembly, whatever tier hands it out."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from placing_kit import SHAPES, entry
from ragcachekit.model.kv import ChunkKV, is_packed
from ragcachekit.store.memory import GpuStore, HostStore
from ragcachekit.store.quantised import PackedKV, QuantisedStore, pack, unpack
from ragcachekit.store.tiered import TieredStore
from ragcachekit.types import KVKey

KINDS = ("int8", "fp8")
KEY = KVKey("weights", "space", "chunk", "standalone", ())


@pytest.fixture
def triton(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("RAGCACHEKIT_KERNELS", "triton")


def wide(tokens, seed, dtype=torch.float32):
    """Channels of very different size, which have scales of their own."""
    kv = entry(tokens, seed, SHAPES, dtype)
    kv = kv.each(lambda t: t * torch.logspace(-2, 1, t.shape[2]).to(dtype))
    return replace(kv, sums={"attended": torch.arange(tokens).float()})


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    st.sampled_from(KINDS),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.integers(1, 9),
    st.integers(0, 1 << 16),
)
def test_looks_unpacked(kind, dtype, tokens, seed):
    kv = wide(tokens, seed, dtype)
    plain = unpack(pack(kv, kind), kind)
    lazy = PackedKV.of(pack(kv, kind), kind)
    assert (lazy.tokens, lazy.layers, lazy.start) == (plain.tokens, plain.layers, plain.start)
    assert (lazy.nbytes, lazy.shapes, lazy.quantised) == (plain.nbytes, plain.shapes, kind)
    assert set(lazy.sums) == {"attended"}
    assert "_plain" not in vars(lazy), "nothing of that unpacks"
    for same in (lazy, lazy.unpacked(), lazy.to("cpu"), lazy.each(torch.clone)):
        assert all(map(torch.equal, (*same.keys, *same.values), (*plain.keys, *plain.values)))
        assert same.quantised == kind
    assert {type(lazy.unpacked()), type(lazy.to("cpu")), type(lazy.each(torch.clone))} == {ChunkKV}


@pytest.mark.parametrize("kind", KINDS)
def test_a_tier_hands_out_eight_bits_where_kernels_run_and_nowhere_else(kind, monkeypatch):
    pytest.importorskip("triton")
    tier, kv = GpuStore(1 << 20, "cpu"), wide(6, 0)
    store = QuantisedStore(tier, kind)
    assert store.put(KEY, kv)
    before = store.stats()[0].nbytes
    plain = store.get(KEY).kv
    assert type(plain) is ChunkKV
    monkeypatch.setenv("RAGCACHEKIT_KERNELS", "triton")
    store = QuantisedStore(tier, kind)
    packed = store.get(KEY).kv
    assert isinstance(packed, PackedKV)
    assert {t.itemsize for t in packed.stored_layer(0)[:2]} == {1}
    assert all(map(torch.equal, packed.keys, plain.keys))
    assert (packed.nbytes, packed.quantised) == (plain.nbytes, plain.quantised)
    assert store.stats()[0].nbytes == before == pack(kv, kind).nbytes


def test_faster_tiers_keep_what_they_always_kept(triton):
    host, slow, kv = HostStore(1 << 20), QuantisedStore(HostStore(1 << 20), "int8"), wide(6, 0)
    store = TieredStore([host, slow])
    assert slow.put(KEY, kv)
    assert isinstance(store.get(KEY).kv, PackedKV)
    promoted = host.get(KEY).kv
    plain = unpack(pack(kv, "int8"), "int8")
    assert type(promoted) is ChunkKV
    assert not is_packed(promoted.sums)
    assert promoted.quantised == "int8"
    assert all(map(torch.equal, promoted.keys, plain.keys))
