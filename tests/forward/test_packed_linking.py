"""KV in eight bits, linked as it lies, is what unpacking first and linking then makes of it."""

from __future__ import annotations

import weakref
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_kit import PROMPT, rag_for
from families import wrapped
from loading_kit import start
from placing_kit import NEAR, SHAPES, assert_as_on_cpu, entry, many_kinds, placing_of, prompt, read
from ragcachekit.config import StoreConfig
from ragcachekit.forward import linker
from ragcachekit.model.kv import ChunkKV, is_packed
from ragcachekit.model.packed import PackedKV, unpack
from ragcachekit.store.base import Found, LayerSource
from ragcachekit.store.disk import DiskStore
from ragcachekit.store.load import LoadingKV
from ragcachekit.store.loader import Loader
from ragcachekit.store.memory import GpuStore, HostStore
from ragcachekit.store.quantised import QuantisedStore, pack
from ragcachekit.store.tiered import TieredStore
from ragcachekit.types import KVKey
from simulated import SCHEDULES, Simulated

KINDS = ("int8", "fp8")
KEY = KVKey("weights", "space", "chunk", "standalone", ())
ASKED = {"max_new_tokens": 6, "do_sample": False}


@pytest.fixture
def triton(monkeypatch):
    monkeypatch.setenv("RAGCACHEKIT_KERNELS", "triton")


def wide(tokens, seed, dtype=torch.float32):
    """Channels of very different size, which have scales of their own."""
    kv = entry(tokens, seed, SHAPES, dtype)
    kv = kv.each(lambda t: t * torch.logspace(-2, 1, t.shape[2]).to(dtype))
    return replace(kv, sums={"attended": torch.arange(tokens).float()})


def changed(plan, change):
    kvs = {id(p.kv): p.kv for p in plan.pieces}
    new = {key: change(number, kv) for number, (key, kv) in enumerate(kvs.items())}
    return replace(plan, pieces=tuple(replace(p, kv=new[id(p.kv)]) for p in plan.pieces))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("near", NEAR)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("keep", [None, 4])
def test_placed_as_unpacked_and_placed_under_every_schedule(keep, kind, near, schedule):
    """Behind an exact prefix that nobody rounds, with one entry twice; and cropped."""
    rope, device = many_kinds(), Simulated(schedule)
    prefix = entry(4, 9, SHAPES, start=0)
    a, b, c = (wide(n, seed) for seed, n in enumerate((9, 1, 6)))
    plan = prompt([prefix, a, b, a], rows=(6, 9)) if keep is None else prompt([c, a], keep=keep)
    expected = changed(plan, lambda _, kv: kv if kv.start == 0 else unpack(pack(kv, kind), kind))
    sent = []

    def on(number, kv):
        small = kv if kv.start == 0 else pack(kv, kind)
        moved = small.each(lambda t: device.put(t, device=NEAR[near](number)))
        if not NEAR[near](number):
            sent.append(sum(t.nbytes for i in range(moved.layers) for t in moved.stored_layer(i)))
        return moved if kv.start == 0 else PackedKV.of(moved, kind)

    seen = read(device, placing_of(changed(plan, on), rope, device), len(SHAPES))
    assert_as_on_cpu(seen, expected, rope)
    assert device.copied == sum(sent), "eight bits and scales travel, and nothing else"
    assert device.faults == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("near", [True, False])
def test_placed_by_the_kernel(kind, near, triton):
    rope, device = many_kinds(), Simulated()
    plan = prompt([wide(5, 0), wide(7, 1)])
    expected = changed(plan, lambda _, kv: unpack(pack(kv, kind), kind))
    packed = changed(
        plan,
        lambda _, kv: PackedKV.of(pack(kv, kind).each(lambda t: device.put(t, device=near)), kind),
    )
    seen = read(device, placing_of(packed, rope, device), len(SHAPES))
    assert_as_on_cpu(seen, expected, rope)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    st.sampled_from(KINDS),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.integers(1, 9),
    st.integers(0, 1 << 16),
)
def test_looks_unpacked_to_everybody_else(kind, dtype, tokens, seed):
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


def test_scales_go_where_the_eight_bits_go():
    moved = pack(wide(4, 0), "int8").to("meta")
    assert {t.device.type for i in range(moved.layers) for t in moved.stored_layer(i)} == {"meta"}
    assert [len(moved.stored_layer(i)) for i in range(moved.layers)] == [4] * len(SHAPES)
    assert moved.sums["attended"].device.type == "cpu"


class TestStore:
    """What a tier that rounds hands out, to whom."""

    @pytest.mark.parametrize("kind", KINDS)
    def test_eight_bits_where_kernels_run_and_nowhere_else(self, kind, monkeypatch):
        store = QuantisedStore(GpuStore(1 << 20, "cpu"), kind)
        kv = wide(6, 0)
        assert store.put(KEY, kv)
        before = store.stats()[0].nbytes
        plain = store.get(KEY).kv
        assert type(plain) is ChunkKV
        monkeypatch.setenv("RAGCACHEKIT_KERNELS", "triton")
        packed = store.get(KEY).kv
        assert isinstance(packed, PackedKV)
        assert packed.planes.formats[0].scaled
        assert packed.planes is store.get(KEY).kv.planes, "read from the tensors once"
        assert all(map(torch.equal, packed.keys, plain.keys))
        assert (packed.nbytes, packed.quantised) == (plain.nbytes, plain.quantised)
        assert store.stats()[0].nbytes == before == pack(kv, kind).nbytes

    def test_is_lent_as_long_as_it_is_held(self, triton):
        tier = HostStore(pack(wide(6, 0), "int8").nbytes)
        store = QuantisedStore(tier, "int8")
        assert store.put(KEY, wide(6, 0))
        held = store.get(KEY).kv
        other = replace(KEY, chunk_id="other")
        assert not store.put(other, wide(6, 1)), "the room is in use"
        alive = weakref.ref(held)
        del held
        assert alive() is None
        assert store.put(other, wide(6, 1))

    def test_faster_tiers_keep_what_they_always_kept(self, triton, tmp_path):
        kv, key = wide(6, 0), KEY
        host = HostStore(1 << 20)
        slow = QuantisedStore(HostStore(1 << 20), "int8")
        store = TieredStore([host, slow])
        assert slow.put(key, kv)
        assert isinstance(store.get(key).kv, PackedKV)
        promoted = host.get(key).kv
        plain = unpack(pack(kv, "int8"), "int8")
        assert type(promoted) is ChunkKV
        assert not is_packed(promoted.sums)
        assert promoted.quantised == "int8"
        assert all(map(torch.equal, promoted.keys, plain.keys))

    @pytest.mark.parametrize("kind", KINDS)
    def test_a_stream_looks_unpacked_and_sends_eight_bits(self, kind, triton, tmp_path):
        host = HostStore(1 << 20)
        slow = QuantisedStore(DiskStore(tmp_path / "kv", 1 << 20), kind)
        store = TieredStore([host, slow])
        kv, rope = wide(6, 0), many_kinds()
        assert slow.put(KEY, kv)
        plain, small = unpack(pack(kv, kind), kind), pack(kv, kind)
        assert isinstance(slow.open(KEY), LayerSource)
        loader = Loader(store)
        handle = start(loader, KEY).kv
        assert isinstance(handle, LoadingKV)
        assert (handle.shapes, handle.quantised) == (plain.shapes, kind)
        assert set(handle.sums) == {"attended"}
        device = Simulated()
        placing = placing_of(prompt([handle]), rope, device)
        assert_as_on_cpu(read(device, placing, len(SHAPES)), prompt([plain]), rope)
        assert device.copied == sum(t.nbytes for i in range(5) for t in small.stored_layer(i))
        assert all(map(torch.equal, (*handle.keys, *handle.values), (*plain.keys, *plain.values)))
        assert loader.flush(60)
        loader.close()
        found = host.get(KEY)
        assert isinstance(found, Found)
        assert type(found.kv) is ChunkKV
        assert all(map(torch.equal, found.kv.values, plain.values))
        store.close()


@pytest.mark.parametrize(("kind", "tier"), [("int8", "host"), ("fp8", "host"), ("int8", "disk")])
def test_answers_and_reports_are_those_of_unpacking_first(kind, tier, tmp_path, monkeypatch):
    config = StoreConfig(
        host_bytes=1 << 26 if tier == "host" else 0,
        disk_path=None if tier == "host" else tmp_path / "kv",
        quantise={tier: kind},
    )
    with rag_for("llama", policy="lego:4", store=config, load="always") as rag:
        rag.generate(PROMPT, max_new_tokens=1)
        expected = rag.generate(PROMPT, **ASKED)
        # Only who hands out and who places goes the way of a GPU; Triton itself is tried above.
        monkeypatch.setattr("ragcachekit.store.quantised.uses_triton", lambda device: True)
        monkeypatch.setattr(linker, "uses_triton", lambda device: True)
        devices = []
        monkeypatch.setattr(
            linker, "streams_of", lambda _: devices.append(Simulated(at_once=True)) or devices[-1]
        )
        answer = rag.generate(PROMPT, **ASKED)
    assert answer.token_ids == expected.token_ids
    ours, theirs = answer.report.link, expected.report.link
    assert ours.uses == theirs.uses
    assert {use.source for use in ours.uses} == {tier}
    assert (ours.recomputed_tokens, ours.notes) == (theirs.recomputed_tokens, theirs.notes)
    assert 0 < sum(device.copied for device in devices) < 0.5 * _nbytes(rag, answer)


def _nbytes(rag, answer):
    """Full-width KV of the chunks of an answer."""
    config = wrapped("llama").config
    per_token = 2 * 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    return per_token * sum(use.tokens for use in answer.report.link.uses)
