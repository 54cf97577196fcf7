"""What kernels put in place is what the CPU path puts there, from whatever memory and in whatever order."""

from __future__ import annotations

import weakref
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from families import LONGROPE_THRESHOLD
from link_kit import described, plan_of
from placing_kit import (
    NEAR,
    SHAPES,
    assert_as_on_cpu,
    cpu_path,
    entry,
    many_kinds,
    on,
    placing_of,
    prompt,
    prompts,
    read,
)
from ragcachekit.forward import placing
from ragcachekit.forward.copy_streams import streams_of
from ragcachekit.forward.placing import Placing
from ragcachekit.plan.link_plan import Piece
from ragcachekit.policies.cacheblend import CacheBlend
from ragcachekit.store.memory import in_slabs
from ragcachekit_kernels import dispatch, reference
from simulated import SCHEDULES, Simulated


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("near", NEAR)
@pytest.mark.parametrize("kind", prompts())
def test_equals_the_cpu_path_under_every_schedule(kind, near, schedule):
    plan, rope, device = prompts()[kind], many_kinds(), Simulated(schedule)
    it = placing_of(on(device, plan, NEAR[near]), rope, device)
    seen = read(device, it, len(SHAPES))
    assert_as_on_cpu(seen, plan, rope)
    assert device.faults == []
    assert not it.coming
    far = {id(p.kv): p.kv.nbytes for n, p in enumerate(plan.pieces)}
    if near == "all far":
        assert device.copied == sum(far.values()), "each entry once, however often it is used"
    if near == "all near":
        assert device.copied == 0


@st.composite
def drawn_prompts(draw):
    """A prompt over entries, perhaps a prefix first, some cropped, some rows of theirs recomputed."""
    kvs = [
        entry(draw(st.integers(1, 12)), seed, SHAPES, start=draw(st.sampled_from([None, None, 0])))
        for seed in range(draw(st.integers(1, 4)))
    ]
    some = draw(st.lists(st.sampled_from(kvs), min_size=1, max_size=5))
    # A prefix stands at the start, once.
    some = [kv for n, kv in enumerate(some) if kv.start is None or n == 0]
    plan = prompt(some, draw(st.integers(1, 4)), keep=draw(st.sampled_from([None, 3])))
    again = draw(st.sets(st.integers(0, len(plan.token_ids) - 1), max_size=6))
    plan = replace(plan, rows=tuple(sorted({*plan.rows, *again})))
    assume(plan.kept)
    return plan, draw(st.integers(0, 15)), draw(st.sampled_from([0, 20_000])), draw(st.integers(0, 1 << 20))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(drawn_prompts())
def test_any_prompt_equals_the_cpu_path(case):
    plan, near, room, schedule = case
    device, rope = Simulated(schedule), many_kinds()
    it = placing_of(on(device, plan, lambda n: bool(near >> n & 1)), rope, device, room)
    seen = read(device, it, len(SHAPES))
    assert_as_on_cpu(seen, plan, rope)
    assert device.faults == []


@pytest.mark.parametrize("near", NEAR)
@pytest.mark.parametrize("kind", prompts())
def test_triton_kernels_place_the_same(kind, near, monkeypatch):
    monkeypatch.setenv("RAGCACHEKIT_KERNELS", "triton")
    monkeypatch.setattr(reference, "assemble", lambda *_: pytest.fail("this is for Triton"))
    plan, rope, device = prompts()[kind], many_kinds(), Simulated(0)
    seen = read(device, placing_of(on(device, plan, NEAR[near]), rope, device), len(SHAPES))
    assert_as_on_cpu(seen, plan, rope)
    assert device.faults == []


@pytest.mark.parametrize("length", [LONGROPE_THRESHOLD - 5, LONGROPE_THRESHOLD + 20])
def test_frequencies_are_those_of_the_whole_prompt(length):
    rope, device = described("phi3-longrope"), Simulated()
    assert rope.depends_on_length
    shapes = ((2, 16, 16),) * 3
    plan = plan_of(range(length), [Piece(5, entry(20, 0, shapes))], [*range(5), *range(25, length)])
    seen = read(device, placing_of(on(device, plan, lambda _: False), rope, device), 3)
    assert_as_on_cpu(seen, plan, rope)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(dtype):
    rope, device = described("qwen3"), Simulated()
    shapes = ((2, 32, 32),) * 3
    plan = prompt([entry(9, 0, shapes, dtype), entry(5, 1, shapes, dtype)])
    seen = read(device, placing_of(on(device, plan, lambda n: n == 0), rope, device), 3)
    expected = cpu_path(plan, rope)
    kept = [p for p in range(len(plan.token_ids)) if p not in plan.rows]
    for layer in range(3):
        for ours, theirs in zip(seen[layer], expected[layer], strict=True):
            steps = ours[0, :, kept].view(torch.int16).int() - theirs[0, :, kept].view(torch.int16).int()
            assert steps.abs().max() <= 1


def launches(monkeypatch):
    """How many planes each launch does."""
    real, calls, made = dispatch.assembly, [], []

    class Counted:
        def __init__(self, planes, *args, **kwargs):
            made.append(self)
            self.planes, self.it = len(planes), real(planes, *args, **kwargs)

        def run(self, first=0, last=None):
            calls.append((self.planes if last is None else last) - first)
            self.it.run(first, last)

    monkeypatch.setattr(placing.dispatch, "assembly", Counted)
    return calls, made


@pytest.mark.parametrize(("near", "expected"), [("all near", [10]), ("all far", [2] * 5), ("mixed", [2] * 5)])
def test_one_launch_where_all_is_there_else_one_per_layer(monkeypatch, near, expected):
    (calls, made), device = launches(monkeypatch), Simulated()
    plan = on(device, prompt([entry(n, n, SHAPES) for n in (9, 4, 7)]), NEAR[near])
    it = placing_of(plan, many_kinds(), device)
    assert (it.coming == 0) is (near == "all near")
    it.layer(0)
    device.finish()
    assert calls == expected[:1]
    read(device, it, 0)
    for layer in range(1, 5):
        it.layer(layer)
    device.finish()
    assert calls == expected
    assert len(made) == 1, "what layers share is packed once"


def test_layers_asked_for_out_of_order_bring_those_before_them():
    device, rope = Simulated(), many_kinds()
    plan = prompt([entry(9, 0, SHAPES), entry(4, 1, SHAPES)])
    it = placing_of(on(device, plan, lambda _: False), rope, device)
    views = {layer: it.layer(layer) for layer in (2, 0, 4, 1, 3)}
    device.finish()
    assert_as_on_cpu(views, plan, rope)


@pytest.mark.parametrize("slots", [20, 21, 24])
def test_every_head_begins_at_16_bytes(slots):
    device = Simulated()
    plan = on(device, prompt([entry(slots - 6, 0, SHAPES, torch.bfloat16)]), lambda _: True)
    it = placing_of(plan, many_kinds(), device)
    views = [tensor for layer in range(5) for tensor in it.layer(layer)]
    assert len(device.allocated) == 5
    assert len({v.untyped_storage().data_ptr() for v in views}) == 5
    for view in views:
        assert view.shape[2] == slots
        assert view.stride(3) == 1
        assert view.stride(2) == view.shape[3]
        assert view.data_ptr() % 16 == 0
        assert view.stride(1) * 2 % 16 == 0
    spans = sorted((v.data_ptr(), v.data_ptr() + v.shape[1] * v.stride(1) * 2) for v in views)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
    device.finish()


def test_each_layer_has_memory_of_its_own():
    """So that decoding, which moves layer by layer, frees memory as it goes."""
    device, rope = Simulated(), many_kinds()
    plan = prompt([entry(9, 0, SHAPES), entry(4, 1, SHAPES)])
    it = placing_of(on(device, plan, lambda _: True), rope, device)
    seen = read(device, it, 5)
    assert_as_on_cpu(seen, plan, rope)
    assert len(device.allocated) == 5


@pytest.mark.parametrize("near", [True, False])
def test_rows_to_compute_are_left_alone_unless_a_policy_compares_them(near):
    device = Simulated()
    plan = prompt([entry(9, 0, SHAPES)], rows=(4, 5, 8))
    for policy, untouched in ((None, [4, 5, 8]), (CacheBlend(0.2), [])):
        there = on(device, replace(plan, policy=policy), lambda _: near)
        seen = read(device, placing_of(there, many_kinds(), device), 5)
        for pair in seen.values():
            for side in pair:
                assert [p for p in range(3, 12) if side[0, :, p].isnan().all()] == untouched
                assert not side[0, :, [3, 6, 7, 9, 10, 11]].isnan().any()


def test_memory_goes_with_the_layers_and_sources_when_they_have_landed():
    device = Simulated()
    plan = on(device, prompt([entry(9, 0, SHAPES), entry(5, 1, SHAPES)]), lambda n: n == 0)
    kvs = [weakref.ref(piece.kv) for piece in plan.pieces]
    it = placing_of(plan, many_kinds(), device)
    del plan
    assert it.settling is None
    for layer in range(5):
        it.layer(layer)
        assert kvs[1]() is not None
    device.finish()
    assert it.settling > 0
    assert [kv() for kv in kvs] == [None, None]
    assert device.memories == [], "what was placed is the layers', not ours"
    assert device.faults == []


def test_settling_is_the_time_of_the_device_and_not_of_what_ran_before():
    device = Simulated("copies first")
    it = placing_of(on(device, prompt([entry(9, 0, SHAPES)]), lambda _: True), many_kinds(), device)
    for _ in range(1000):
        device.compute(lambda: None)
    it.layer(0)
    device.finish()
    assert 0 < it.settling < 10


def test_what_fails_before_the_first_layer_is_done_again(monkeypatch):
    """Memory for the table may be short once; asked again, nothing may count as placed that is not."""
    device, rope, real = Simulated(), many_kinds(), dispatch.assembly
    plan = prompt([entry(9, 0, SHAPES), entry(4, 1, SHAPES)])
    it = placing_of(on(device, plan, lambda n: n == 0), rope, device)

    def fails(*args, **kwargs):
        monkeypatch.setattr(placing.dispatch, "assembly", real)
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(placing.dispatch, "assembly", fails)
    with pytest.raises(torch.OutOfMemoryError):
        it.layer(0)
    assert_as_on_cpu(read(device, it, 5), plan, rope)


on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")


@on_gpu
@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("near", NEAR)
@pytest.mark.parametrize("kind", prompts())
def test_a_gpu_places_the_same(kind, near, pinned):
    plan, rope, gpu = prompts()[kind], many_kinds(), torch.device("cuda")
    kvs = {id(p.kv): p.kv for p in plan.pieces}
    moved = {
        at: kv.to(gpu) if NEAR[near](n) else in_slabs(kv) if pinned else kv
        for n, (at, kv) in enumerate(kvs.items())
    }
    there = replace(plan, pieces=tuple(replace(p, kv=moved[id(p.kv)]) for p in plan.pieces))
    it = Placing(there, rope, gpu, streams_of(gpu), room=0)
    seen = {layer: tuple(side.cpu() for side in it.layer(layer)) for layer in range(len(SHAPES))}
    assert_as_on_cpu(seen, plan, rope)
    assert it.settling > 0
