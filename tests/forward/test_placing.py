"""Kept rows are put in place layer by layer: by torch and by the kernel, from any tier, in any order."""

import contextlib
import gc
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_kit import PROMPT, rag_for, warmed
from families import LONGROPE_THRESHOLD
from link_kit import described, plan_of
from placing_kit import SHAPES, assemble, assembled, assert_placed, changed, entry, many_kinds, prompt
from ragcachekit.config import StoreConfig
from ragcachekit.forward.linker import AHEAD, StoredLayers
from ragcachekit.plan.link_plan import Piece
from ragcachekit.store.memory import HostStore

ASKED = {"max_new_tokens": 6, "do_sample": False}


def prompts():
    """Named plans over layers of :func:`many_kinds`."""
    a, b, c = (entry(n, seed, SHAPES) for seed, n in enumerate((9, 1, 6)))
    prefix = entry(4, 9, SHAPES, start=0)
    return {
        "one chunk twice": prompt([a, b, a]),
        "after an exact prefix": prompt([prefix, a, b], rows=(5, 6, 9)),
        "cropped": prompt([a, c], keep=3, first=2),
    }


@pytest.mark.parametrize("kind", prompts())
def test_every_way_to_rotate(kind, path):
    plan, rope = prompts()[kind], many_kinds()
    before = changed(plan, lambda kv: kv.each(torch.clone))
    assert_placed(assembled(plan, rope), plan, rope)
    for piece, copy in zip(plan.pieces, before.pieces, strict=True):
        pairs = zip((*piece.kv.keys, *piece.kv.values), (*copy.kv.keys, *copy.kv.values), strict=True)
        assert all(torch.equal(x, y) for x, y in pairs), "stored tensors are never written to"


@st.composite
def drawn_prompts(draw):
    """A prompt over entries, perhaps a prefix first, some cropped."""
    kvs = [
        entry(draw(st.integers(1, 12)), seed, SHAPES, start=draw(st.sampled_from([None, None, 0])))
        for seed in range(draw(st.integers(1, 4)))
    ]
    some = draw(st.lists(st.sampled_from(kvs), min_size=1, max_size=5))
    some = [kv for n, kv in enumerate(some) if kv.start is None or n == 0]  # a prefix is the start, once
    return prompt(some, draw(st.integers(1, 4)), keep=draw(st.sampled_from([None, 3])))


@pytest.mark.parametrize("examples", [10, pytest.param(25, marks=pytest.mark.soak)])
def test_any_prompt(path, examples):
    rope = many_kinds()

    @settings(max_examples=examples, deadline=None, derandomize=True)
    @given(drawn_prompts())
    def check(plan):
        assert_placed(assembled(plan, rope), plan, rope)

    check()


@pytest.mark.parametrize("length", [LONGROPE_THRESHOLD - 5, LONGROPE_THRESHOLD + 20])
def test_frequencies_are_those_of_the_whole_prompt(length, path):
    rope = described("phi3-longrope")
    assert rope.depends_on_length
    plan = plan_of(
        range(length), [Piece(5, entry(20, 0, ((2, 16, 16),) * 3))], [*range(5), *range(25, length)]
    )
    assert_placed(assembled(plan, rope), plan, rope)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(dtype, path):
    rope, shapes = described("qwen3"), ((2, 32, 32),) * 3
    plan = prompt([entry(9, 0, shapes, dtype), entry(5, 1, shapes, dtype)])
    exact = changed(plan, lambda kv: kv.each(torch.Tensor.float))
    once = [[side.to(dtype) for side in pair] for pair in assembled(exact, rope)]
    for ours, theirs in zip(assembled(plan, rope), once, strict=True):
        for piece in plan.pieces:
            at = slice(piece.start, piece.stop)
            for mine, want in zip(ours, theirs, strict=True):
                steps = mine[:, at].view(torch.int16).int() - want[:, at].view(torch.int16).int()
                assert steps.abs().max() <= 1


class FakeCuda:
    """Streams and tensors of a GPU as far as copies need them; ``log`` has the calls in order."""

    def __init__(self, monkeypatch):
        self.log, self.now = [], "compute"
        monkeypatch.setattr(torch.cuda, "Stream", self.current_stream)
        monkeypatch.setattr(torch.cuda, "stream", self.stream)
        monkeypatch.setattr(torch.cuda, "current_stream", self.current_stream)

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.now = self.now, "copies"
        yield
        self.now = before

    def current_stream(self, device):
        return self

    def record_event(self):
        return f"copies until {len(self.log)}"

    def wait_event(self, event):
        self.log.append(("wait", event))

    def entry(self, layers):
        """An entry whose layers are one tensor each, or not loaded yet where ``ready`` is smaller."""
        fake = self

        class Tensor:
            def __init__(self, layer):
                self.layer = layer

            def to(self, device, non_blocking):
                assert non_blocking
                fake.log.append((fake.now, self.layer))
                return self

            def record_stream(self, stream):
                assert stream is fake
                fake.log.append(("used by compute", self.layer))

        class Entry:
            def __init__(self):
                self.layers, self.ready = layers, layers

            def layer(self, number):
                return (Tensor(number),)

        return Entry()


class TestCopies:
    """To a GPU: on a stream of their own, ahead of their use, waited for by the kernels alone."""

    def test_layers_go_ahead_of_their_use(self, monkeypatch):
        cuda = FakeCuda(monkeypatch)
        stored = StoredLayers({1: cuda.entry(4)}, torch.device("cuda"))
        assert cuda.log == [("copies", layer) for layer in range(AHEAD)]
        for layer in range(4):
            cuda.log.clear()
            ((tensor,),) = stored.take(layer).values()
            assert tensor.layer == layer
            assert cuda.log[0][0] == "wait"
            assert cuda.log[1] == ("used by compute", layer)
            ahead = [("copies", layer + AHEAD)] if layer + AHEAD < 4 else []
            assert cuda.log[2:] == ahead

    def test_what_is_not_loaded_is_not_waited_for_ahead(self, monkeypatch):
        cuda = FakeCuda(monkeypatch)
        slow = cuda.entry(3)
        monkeypatch.setattr("ragcachekit.forward.linker.LoadingKV", type(slow))
        slow.ready = 0
        stored = StoredLayers({1: slow}, torch.device("cuda"))
        assert cuda.log == []
        slow.ready = 1
        stored.take(0)
        assert [step for step in cuda.log if step[0] == "copies"] == [("copies", 0)]


class TestAnswers:
    """Whole answers by the kernels are those of the CPU path."""

    CASES = (("llama", "lego:4"), ("gemma3", "reuse"), ("glm4", "cacheblend:0.3"))

    @pytest.mark.parametrize(("name", "policy"), CASES)
    def test_tokens_are_the_same(self, name, policy, monkeypatch):
        pytest.importorskip("triton")
        rag = warmed(name, PROMPT, policy=policy, store=HostStore(1 << 28))
        expected = rag.generate(PROMPT, **ASKED)
        monkeypatch.setenv("RAGCACHEKIT_KERNELS", "triton")
        answer = rag.generate(PROMPT, **ASKED)
        assert answer.token_ids == expected.token_ids
        assert answer.report.link.kernels == "triton"

    @pytest.mark.parametrize(("kind", "tier"), [("int8", "host"), ("fp8", "host"), ("int8", "disk")])
    def test_of_eight_bits_too(self, kind, tier, tmp_path, monkeypatch):
        pytest.importorskip("triton")
        config = StoreConfig(
            host_bytes=1 << 26 if tier == "host" else 0,
            disk_path=None if tier == "host" else tmp_path / "kv",
            quantise={tier: kind},
        )
        with rag_for("llama", policy="lego:4", store=config, load="always") as rag:
            rag.generate(PROMPT, max_new_tokens=1)
            expected = rag.generate(PROMPT, **ASKED)
            monkeypatch.setenv("RAGCACHEKIT_KERNELS", "triton")
            answer = rag.generate(PROMPT, **ASKED)
        assert answer.token_ids == expected.token_ids
        ours, theirs = answer.report.link, expected.report.link
        assert ours.uses == theirs.uses
        assert {use.source for use in ours.uses} == {tier}
        assert (ours.recomputed_tokens, ours.notes) == (theirs.recomputed_tokens, theirs.notes)

    def test_entries_are_held_no_longer_than_their_layers_are_needed(self):
        kvs = [entry(9, 0, SHAPES), entry(5, 1, SHAPES)]
        held = [weakref.ref(kv) for kv in kvs]
        buffers = assemble(prompt(kvs), many_kinds(), torch.device("cpu"))
        del kvs
        for make in buffers:
            make()
        del buffers, make
        gc.collect()
        assert [kv() for kv in held] == [None, None]


on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")


@on_gpu
@pytest.mark.parametrize("where", ["gpu", "pinned", "ordinary", "mixed"])
@pytest.mark.parametrize("kind", prompts())
def test_a_gpu_places_the_same(kind, where):
    plan, rope, gpu = prompts()[kind], many_kinds(), torch.device("cuda")
    moves = {
        "gpu": lambda kv: kv.to(gpu),
        "pinned": lambda kv: kv.each(torch.Tensor.pin_memory),
        "ordinary": lambda kv: kv,
        "mixed": lambda kv: kv.to(gpu) if kv.tokens % 2 else kv,
    }
    sides = assembled(changed(plan, moves[where]), rope, gpu)
    assert_placed(sides, plan, rope)
