"""Layers on their way to a device: right under every order in which its queues may run, and let go of."""

from __future__ import annotations

import weakref
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ragcachekit.forward.copy_streams import Streams
from ragcachekit.forward.transfers import LEAST, MOST, Transfers
from ragcachekit.model.kv import ChunkKV
from ragcachekit.store import memory as page_locked
from ragcachekit.store.load import Load, LoadFailed, LoadingKV
from ragcachekit.store.quantised import pack
from ragcachekit.threads import Condition
from ragcachekit.types import KVKey
from simulated import SCHEDULES, Simulated

KEY = KVKey("fingerprint", "space", "chunk", "standalone", ())


def drawn(shapes, tokens, seed, dtype=torch.float32):
    """An entry; ``shapes`` are per layer ``(heads, key dim, value dim)``."""
    random = torch.Generator().manual_seed(seed)

    def side(heads, dim):
        return torch.randn(heads, tokens, dim, generator=random).to(dtype)

    keys = tuple(side(heads, dim) for heads, dim, _ in shapes)
    return ChunkKV(keys, tuple(side(heads, dim) for heads, _, dim in shapes))


def on_host(device, kv):
    return kv.each(lambda tensor: device.put(tensor, device=False))


def in_stretches(device, kv):
    """As the host tier lays page-locked entries."""

    def allocated(nbytes):
        return device.put(torch.full((nbytes,), 0xFF, dtype=torch.uint8), device=False)

    with mock.patch.object(page_locked, "page_locked", allocated):
        return page_locked.in_slabs(kv)


def used(device, transfers, layers):
    """What each layer's work sees at the moment when the device does it."""
    seen = {}
    for layer in range(layers):

        def work(chunks, layer=layer):
            seen[layer] = [tuple(t.clone() for t in chunk.tensors) for chunk in chunks]

        transfers.use(layer, work)
    return seen


def all_equal(seen, kvs):
    return all(
        torch.equal(pair[0], kv.keys[layer]) and torch.equal(pair[1], kv.values[layer])
        for layer, pairs in seen.items()
        for pair, kv in zip(pairs, kvs, strict=True)
    )


@st.composite
def cases(draw):
    layers = draw(st.integers(1, 11))
    kinds = draw(st.lists(st.tuples(*[st.integers(1, 3)] * 3), min_size=1, max_size=2))
    shapes = [kinds[draw(st.integers(0, len(kinds) - 1))] for _ in range(layers)]
    tokens = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int8]))
    schedule = draw(st.one_of(st.sampled_from(SCHEDULES[:3]), st.integers(0, 1 << 20)))
    return shapes, tokens, dtype, draw(st.sampled_from([0, 3000, 1 << 20])), schedule


@settings(max_examples=100, deadline=None, derandomize=True)
@given(cases())
def test_every_layer_arrives_under_every_schedule(case):
    shapes, tokens, dtype, room, schedule = case
    device, layers = Simulated(schedule), len(shapes)
    kvs = [drawn(shapes, n, seed, dtype) for seed, n in enumerate(tokens)]
    transfers = Transfers(device, [on_host(device, kv) for kv in kvs], room=room)
    transfers.begin()
    seen = used(device, transfers, layers)
    device.finish()
    assert sorted(seen) == list(range(layers))
    assert all_equal(seen, kvs)
    assert device.faults == []
    assert device.copied == transfers.nbytes == sum(kv.nbytes for kv in kvs)
    assert len(device.allocated) == 1
    assert min(LEAST, layers) <= transfers.depth <= min(MOST, layers)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(cases(), st.integers(0, 15))
def test_layers_that_lie_in_one_stretch_are_one_copy(case, which):
    shapes, tokens, dtype, room, schedule = case
    device, layers = Simulated(schedule), len(shapes)
    kvs = [drawn(shapes, n, seed, dtype) for seed, n in enumerate(tokens)]
    there = [(in_stretches if which >> n & 1 else on_host)(device, kv) for n, kv in enumerate(kvs)]
    moves, copy = [], device.copy
    device.copy = lambda listed, after=None: (moves.extend(listed), copy(listed, after))[1]
    transfers = Transfers(device, there, room=room)
    transfers.begin()
    seen = used(device, transfers, layers)
    device.finish()
    assert all_equal(seen, kvs)
    assert device.faults == []
    assert len(moves) == layers * sum(1 if which >> n & 1 else 2 for n in range(len(kvs)))


def test_eight_bits_and_their_scales_are_one_copy():
    device, kv = Simulated(), pack(drawn(SHAPES, 5, 0), "int8")
    transfers = Transfers(device, [in_stretches(device, kv)])
    transfers.begin()
    seen = {}
    for layer in range(len(SHAPES)):

        def work(chunks, layer=layer):
            seen[layer] = [t.clone() for t in (*chunks[0].tensors, *chunks[0].scales)]

        transfers.use(layer, work)
    device.finish()
    assert all(
        torch.equal(ours, stored)
        for layer, tensors in seen.items()
        for ours, stored in zip(tensors, kv.stored_layer(layer), strict=True)
    )
    assert len(seen) == len(SHAPES)


SHAPES = [(2, 4, 3)] * 9


@pytest.mark.parametrize("deaf", ["copy", "compute"])
def test_a_missing_wait_would_be_seen(deaf):
    """The simulation itself: without one of the two waits some schedule gives wrong bytes."""
    wrong = 0
    for schedule in SCHEDULES:
        device = Simulated(schedule, deaf=deaf)
        kvs = [drawn(SHAPES, 5, seed) for seed in range(2)]
        transfers = Transfers(device, [on_host(device, kv) for kv in kvs], room=0)
        transfers.begin()
        seen = used(device, transfers, len(SHAPES))
        device.finish()
        wrong += not all_equal(seen, kvs)
    assert wrong > 0


def test_the_ring_is_used_again_and_no_larger_than_asked_for():
    device = Simulated()
    kv = drawn(SHAPES, 5, 0)
    per_layer = 256 + 256  # 2 x 5 x 4 and 2 x 5 x 3 floats, each rounded up
    transfers = Transfers(device, [on_host(device, kv)], room=4 * per_layer)
    assert transfers.depth == 4
    assert used(device, transfers, 0) == {}
    transfers.begin()
    assert device.allocated == [4 * per_layer]
    device.run(lambda: not device.lanes["copy"])
    assert device.copied == 4 * (kv.keys[0].nbytes + kv.values[0].nbytes), "as far ahead as the ring goes"
    seen = used(device, transfers, len(SHAPES))
    device.finish()
    assert all_equal(seen, [kv])


def test_copies_begin_behind_what_used_the_memory_before():
    """Memory is the compute queue's: what was enqueued there before may still be using it."""
    device, done = Simulated(), []
    device.compute(lambda: done.append(True))
    transfers = Transfers(device, [on_host(device, drawn(SHAPES, 5, 0))])
    transfers.begin()
    device.schedule = "copies first"
    device.run(lambda: device.lanes["copy"] and device._ready("copy"))
    assert done


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("used_layers", [0, 2, 9])
def test_sources_are_held_until_their_copies_have_landed(schedule, used_layers):
    device = Simulated(schedule)
    kv = on_host(device, drawn(SHAPES, 5, 0))
    alive = weakref.ref(kv)
    transfers = Transfers(device, [kv])
    del kv
    transfers.begin()
    used(device, transfers, used_layers)
    assert alive() is not None
    del transfers  # with the request gone, nobody else holds the source, and its copies are under way
    device.finish()
    assert device.faults == []
    assert alive() is None


def test_released_when_all_has_landed_and_not_before():
    device = Simulated()
    kv = on_host(device, drawn(SHAPES, 5, 0))
    alive = weakref.ref(kv)
    transfers = Transfers(device, [kv])
    del kv
    seen = used(device, transfers, len(SHAPES))
    transfers.release()
    assert alive() is not None
    device.run(lambda: not device.lanes["copy"])
    transfers.release()
    assert alive() is None
    device.finish()
    assert len(seen) == len(SHAPES)
    assert device.faults == []


class Header:
    """What a load knows of its entry before it is read."""

    tier, start, quantised = "disk", None, ""
    sums: dict[str, torch.Tensor] = {}  # noqa: RUF012

    def __init__(self, kv):
        self.nbytes, self.tokens, self.layers = kv.nbytes, kv.tokens, kv.layers
        self.shapes = tuple(
            ((k.dtype, tuple(k.shape)), (v.dtype, tuple(v.shape)))
            for k, v in zip(kv.keys, kv.values, strict=True)
        )

    def close(self):
        pass


def loading(kv, there=0, seconds=60.0):
    """A hold on an entry of which ``there`` layers have come, and what makes the others come."""
    load = Load(KEY, Header(kv), Condition(), lambda *_: None)

    def come(layers):
        with load.changed:
            for layer in range(load.read, layers):
                load.pairs[layer] = kv.keys[layer], kv.values[layer]
            load.read = layers
            load.changed.notify_all()

    come(there)
    handle = LoadingKV(load, seconds)
    handle.start_deadline()
    return handle, come


def test_nothing_is_waited_for_ahead():
    device = Simulated()
    kv, other = drawn(SHAPES, 5, 0), drawn(SHAPES, 3, 1)
    handle, come = loading(kv, there=1)
    transfers = Transfers(device, [handle, on_host(device, other)])
    transfers.begin()
    per_layer = transfers.nbytes // len(SHAPES)
    assert device.copied == per_layer
    come(3)
    transfers.begin()
    assert device.copied == 3 * per_layer
    come(9)
    seen = used(device, transfers, 9)
    device.finish()
    assert all_equal(seen, [kv, other])


def test_an_entry_that_has_come_travels_while_the_next_is_waited_for():
    device = Simulated()
    first, second = drawn(SHAPES, 5, 0), drawn(SHAPES, 3, 1)
    late, _ = loading(second, there=0, seconds=0.01)
    transfers = Transfers(device, [loading(first, there=9)[0], late])
    with pytest.raises(LoadFailed):
        used(device, transfers, 1)
    assert device.copied == first.keys[0].nbytes + first.values[0].nbytes


@pytest.mark.parametrize("there", [0, 2, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_does_not_come_ends_the_use_and_hangs_nothing(there, schedule):
    device = Simulated(schedule)
    kv, other = drawn(SHAPES, 5, 0), drawn(SHAPES, 3, 1)
    handle, _ = loading(kv, there, seconds=0.01)
    transfers = Transfers(device, [on_host(device, other), handle], room=0)
    seen = used(device, transfers, there)
    for _ in range(2):
        with pytest.raises(LoadFailed) as failed:
            transfers.use(there, lambda chunks: pytest.fail("was used without having come"))
        assert failed.value.keys == {KEY}
    del transfers
    device.finish()
    assert sorted(seen) == list(range(there))
    assert all_equal(seen, [other, kv])
    assert device.faults == []


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_comes_after_all_is_used_when_asked_for_again(schedule):
    device = Simulated(schedule)
    kv, other = drawn(SHAPES, 5, 0), drawn(SHAPES, 3, 1)
    handle, come = loading(kv, 1, seconds=0.01)
    transfers = Transfers(device, [on_host(device, other), handle], room=0)
    seen = used(device, transfers, 1)
    with pytest.raises(LoadFailed):
        transfers.use(1, lambda chunks: None)
    come(9)
    for layer in range(1, 9):

        def work(chunks, layer=layer):
            seen[layer] = [tuple(t.clone() for t in chunk.tensors) for chunk in chunks]

        transfers.use(layer, work)
    device.finish()
    assert all_equal(seen, [other, kv])
    assert len(seen) == 9


def test_devices_without_queues():
    device = Streams(torch.device("cpu"))
    kvs = [drawn(SHAPES, 5, 0), drawn(SHAPES, 2, 1)]
    transfers = Transfers(device, kvs, room=0)
    transfers.begin()
    assert all_equal(used(device, transfers, len(SHAPES)), kvs)
    assert device.holds(kvs[0].keys[0])
    assert not device.holds(torch.empty(1, device="meta"))
