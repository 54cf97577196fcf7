"""How requests of a batch begin, stream, fail and end."""

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from batch_kit import begin, decoder_for, finish, plan_for
from engine_kit import EXACT, PROMPT, chunk, ids, rag_for, text, warmed
from families import VOCAB, build, greedy, plain, wrapped
from ragcachekit import Prompt, RagCache, TreeConfig
from ragcachekit.engine.grade import why_not_together
from ragcachekit.generate.run import run_generate

OTHER = Prompt([text(14, 8), chunk(33, 2), text(2, 9)])
NEVER = VOCAB + 1


@pytest.fixture(scope="module")
def rag():
    return rag_for("llama", policy="full", cold="never")


@pytest.fixture
def decoder(rag):
    return decoder_for(rag)


class Streamer:
    def __init__(self, fails_at=None):
        self.puts, self.ends, self._fails_at = [], 0, fails_at

    def put(self, value):
        if len(self.puts) == self._fails_at:
            raise OSError("the client has gone")
        self.puts.append(value)

    def end(self):
        self.ends += 1


def greedy_ids(prompt, count=8, **options):
    return greedy(plain("llama"), ids(prompt), count, **options)


class TestEnds:
    def test_the_first_token_may_be_the_last(self, decoder, rag):
        for asked in ({"max_new_tokens": 1}, {"eos_token_id": greedy_ids(PROMPT, 1)[0]}):
            one = begin(decoder, rag, PROMPT, **asked)
            assert one.finished
            assert decoder.active == ()
            assert one.generated().token_ids == greedy_ids(PROMPT, 1)
        assert decoder.step() == []

    def test_a_stop_string(self, rag):
        decoder = decoder_for(rag, decode=lambda ids: "".join(f"<{i}>" for i in ids))
        varied = {"eos_token_id": NEVER, "repetition_penalty": 1.9}
        expected = greedy_ids(PROMPT, 12, **varied)
        assert len(set(expected)) > 8
        stop = f"{expected[4]}><{expected[5]}"
        one = begin(decoder, rag, PROMPT, max_new_tokens=12, stop=[stop], **varied)
        finish(decoder)
        assert one.generated().token_ids == expected[:6]

    def test_time(self, decoder, rag):
        one = begin(decoder, rag, PROMPT, max_new_tokens=30, eos_token_id=NEVER, max_time=0.0)
        assert one.finished
        assert len(one.token_ids) == 1

    def test_a_cancelled_prefill_has_no_tokens(self, decoder, rag):
        cancel, streamer = threading.Event(), Streamer()
        cancel.set()
        one = begin(decoder, rag, PROMPT, cancel=cancel, streamer=streamer)
        assert one.finished
        assert one.generated().cancelled
        assert one.generated().token_ids == ()
        assert streamer.ends == 1

    def test_cancelled_between_steps(self, decoder, rag):
        cancel, streamer = threading.Event(), Streamer()
        asked = {"max_new_tokens": 20, "eos_token_id": NEVER}
        one = begin(decoder, rag, PROMPT, cancel=cancel, streamer=streamer, **asked)
        other = begin(decoder, rag, OTHER, **asked)
        decoder.step()
        cancel.set()
        assert decoder.step() == [one]
        assert one.generated().cancelled
        assert one.generated().token_ids == greedy_ids(PROMPT, 2, eos_token_id=NEVER)
        assert streamer.ends == 1
        finish(decoder)
        assert other.generated().token_ids == greedy_ids(OTHER, 20, eos_token_id=NEVER)

    def test_buffers_are_freed(self, decoder, rag):
        held = []
        for end in (finish, lambda d: d.drop(d.active[0]), lambda d: d.clear()):
            held.append(weakref.ref(begin(decoder, rag, PROMPT).kv))
            end(decoder)
        gc.collect()
        assert [kv() for kv in held] == [None] * 3


class TestStreams:
    def test_a_streamer_gets_what_generate_gives_it(self, decoder, rag):
        ours, theirs = Streamer(), Streamer()
        begin(decoder, rag, PROMPT, streamer=ours, max_new_tokens=5)
        finish(decoder)
        rag.generate(PROMPT, streamer=theirs, max_new_tokens=5, do_sample=False)
        assert [put.tolist() for put in ours.puts] == [put.tolist() for put in theirs.puts]
        assert [put.shape for put in ours.puts] == [put.shape for put in theirs.puts]
        assert ours.ends == theirs.ends == 1

    def test_a_streamer_that_fails_ends_its_own_request(self, decoder, rag):
        one = begin(decoder, rag, PROMPT, streamer=Streamer(fails_at=4), eos_token_id=NEVER)
        other = begin(decoder, rag, OTHER, eos_token_id=NEVER)
        finish(decoder)
        with pytest.raises(OSError, match="the client has gone"):
            one.generated()
        assert other.generated().token_ids == greedy_ids(OTHER, eos_token_id=NEVER)


class TestRoom:
    def test_bytes(self, rag):
        per_token = 3 * 2 * 2 * 16 * 4  # layers, keys and values, heads, dimensions, float32
        decoder = decoder_for(rag, max_bytes=200 * per_token)
        assert decoder.has_room(1000), "alone"
        one = begin(decoder, rag, PROMPT, max_new_tokens=20)
        assert one.tokens == len(ids(PROMPT)) + 20 == 93
        assert decoder.has_room(107)
        assert not decoder.has_room(108)
        begin(decoder, rag, PROMPT, max_new_tokens=20)  # shares all 73 rows
        assert decoder.has_room(87)
        assert not decoder.has_room(88)


class TestOptions:
    def test_the_models_own_generation_config_counts(self, tmp_path):
        settings = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.3}
        settings |= {"eos_token_id": [NEVER, NEVER + 1], "top_k": 20}
        ours, theirs = build("llama"), build("llama")
        for model in (ours, theirs):
            for name, value in settings.items():
                setattr(model.generation_config, name, value)
        rag = RagCache(ours, policy="full", cold="never", cache_dir=tmp_path)
        decoder, options = decoder_for(rag), {"max_new_tokens": 12, "pad_token_id": 0}
        assert decoder.why_alone(options) is None
        torch.manual_seed(3)
        one = decoder.begin(plan_for(rag, PROMPT), options)
        finish(decoder)
        torch.manual_seed(3)
        prompt = torch.tensor([ids(PROMPT)])
        with torch.no_grad():
            out = theirs.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12)
        assert one.generated().token_ids == tuple(out[0, prompt.shape[1] :].tolist())

    @pytest.mark.parametrize("options", [{"num_beams": 2}, {"an_argument_of_this_models_forward": 3}])
    def test_what_runs_alone_is_named(self, decoder, options):
        (name,) = options
        assert name in decoder.why_alone({"max_new_tokens": 3, **options})

    def test_others_run_alone(self, decoder, rag):
        active = begin(decoder, rag, OTHER)
        options = {"max_new_tokens": 8, "num_beams": 3, "pad_token_id": 0}
        generated = decoder.run(plan_for(rag, PROMPT), options)
        assert generated.token_ids == greedy_ids(PROMPT, num_beams=3)
        finish(decoder)
        assert active.generated().token_ids == greedy_ids(OTHER)


class TestModels:
    def test_frequencies_that_depend_on_the_length(self):
        decoder = decoder_for(rag_for("phi3-longrope", policy="full"))
        assert "length" in decoder.why_alone({"max_new_tokens": 3})

    def test_a_model_without_our_attention_fails_the_check(self, monkeypatch):
        assert "attention was exchanged" in why_not_together(build("llama"))
        monkeypatch.setattr("ragcachekit.forward.decode.is_installed", lambda _: True)
        assert "differ from the model's own" in why_not_together(build("llama"))

    def test_a_model_that_fails_says_why(self, monkeypatch):
        model = wrapped("llama")
        monkeypatch.setattr(model.model.norm, "forward", lambda hidden: hidden[:1])
        assert "LlamaForCausalLM cannot decode requests together" in why_not_together(model)


def test_a_step_that_fails_can_be_repeated(decoder, rag, monkeypatch):
    both = [begin(decoder, rag, p, eos_token_id=NEVER) for p in (PROMPT, OTHER)]
    decoder.step()

    def broken(*_, **__):
        raise RuntimeError("out of memory, perhaps")

    with monkeypatch.context() as patch:
        patch.setattr(rag.model.model.layers[1].mlp, "forward", broken)
        with pytest.raises(RuntimeError, match="perhaps"):
            decoder.step()
    assert decoder.active == tuple(both)
    finish(decoder)
    for prompt, one in zip((PROMPT, OTHER), both, strict=True):
        assert one.generated().token_ids == greedy_ids(prompt, eos_token_id=NEVER)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("policy", ["prefix", "cacheblend:0.3"])
def test_the_cache_is_that_of_one_run(name, policy):
    rag = warmed(name, PROMPT, policy=policy, tree=TreeConfig())  # a tree needs all rows
    decoder, parser = decoder_for(rag), rag.components.parser
    ours = begin(decoder, rag, PROMPT, max_new_tokens=6, eos_token_id=NEVER)
    begin(decoder, rag, OTHER)
    finish(decoder)
    options = {"do_sample": False, "max_new_tokens": 6, "eos_token_id": NEVER, "pad_token_id": 0}
    rope, plan = rag.components.rope, plan_for(rag, PROMPT)
    alone = run_generate(rag.model, rope, plan, options, decode=parser.decode)
    generated = ours.generated()
    assert generated.token_ids == alone.token_ids
    assert generated.report.recomputed_tokens == alone.report.recomputed_tokens
    for one, other in zip(generated.cache.layers, alone.cache.layers, strict=True):
        assert one.keys.shape == other.keys.shape
        assert torch.allclose(one.keys, other.keys, atol=1e-4)
        assert torch.allclose(one.values, other.values, atol=1e-4)


def test_what_is_generated_so_far_stays_as_it_is(decoder, rag, monkeypatch):
    monkeypatch.setattr("ragcachekit.forward.decode.GROWTH", 2)
    one = begin(decoder, rag, PROMPT, max_new_tokens=9, eos_token_id=NEVER)
    decoder.step()
    before = one.generated()
    copies = [layer.keys.clone() for layer in before.cache.layers]
    finish(decoder)
    assert before.token_ids == greedy_ids(PROMPT, 2, eos_token_id=NEVER)
    assert copies[0].shape[2] == len(ids(PROMPT)) + 1
    assert all(torch.equal(a.keys, b) for a, b in zip(before.cache.layers, copies, strict=True))


@pytest.mark.parametrize("policy", ["reuse", "cacheblend:0.3"])
def test_entries_may_be_evicted_once_a_prompt_is_computed(policy):
    with warmed("llama", PROMPT, policy=policy) as rag:
        rag.flush()
        decoder, plan = decoder_for(rag), plan_for(rag, PROMPT)
        entries = [weakref.ref(piece.kv) for piece in plan.pieces]
        options = {"do_sample": False, "max_new_tokens": 8, "eos_token_id": NEVER, "pad_token_id": 0}
        one = decoder.begin(plan, options)
        del plan
        rag.components.store.forget("default")  # which holds them, too
        gc.collect()
        assert not one.finished
        assert [entry() for entry in entries] == [None] * len(entries) != []
        finish(decoder)
        assert len(one.generated().plan.pieces) == len(entries)


@pytest.mark.parametrize("name", ["llama", "mistral-sliding"])
@pytest.mark.parametrize("most_held", [0, 1 << 30])
def test_answered_requests_are_captured(name, most_held, monkeypatch):
    """Own entries and tree steps out of a batch are those that rag.generate stores.

    Also where what is held to be summed exceeds its limit, and is summed at once.
    """
    monkeypatch.setattr("ragcachekit.generate.batch.MAX_HELD_BYTES", most_held)
    prompt = Prompt([text(9, 1), chunk(33, 2), chunk(25, 3), text(6, 4)])
    again = Prompt([text(9, 1), chunk(33, 2), chunk(25, 3), text(8, 19)])
    with rag_for(name, policy="reuse", encoder="in-prompt", tree=TreeConfig()) as rag:
        decoder = decoder_for(rag)
        one = begin(decoder, rag, prompt, capture_missing_rows=True)
        begin(decoder, rag, EXACT)
        finish(decoder)
        assert (one.generated().own.nbytes == 0) == (most_held == 0)
        rag.after_answer.keep(one.generated())
        rag.flush()
        answer = rag.generate(again, max_new_tokens=8, do_sample=False)
        assert answer.report.link.exact_tokens >= 67
        assert answer.token_ids == greedy(plain(name), ids(again), 8)


def test_other_threads_on_the_model(rag):
    """Answers in the caller's thread and the model's own generate, while a batch is decoded."""
    expected = greedy_ids(PROMPT, 20, eos_token_id=NEVER)
    asked = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": NEVER}

    def batch():
        decoder, out = decoder_for(rag), []
        for _ in range(4):
            out += [begin(decoder, rag, PROMPT, **asked) for _ in range(3)]
            finish(decoder)
        return [one.generated().token_ids for one in out]

    jobs = [
        batch,
        lambda: [rag.generate(PROMPT, **asked).token_ids for _ in range(4)],
        lambda: [greedy(rag.model, ids(PROMPT), 20, **asked) for _ in range(4)],
        lambda: [rag.generate(PROMPT, policy="lego:1000", **asked).token_ids for _ in range(4)],
    ]
    with ThreadPoolExecutor(4) as pool:
        answers = [one for out in pool.map(lambda job: job(), jobs) for one in out]
    assert answers == [expected] * len(answers)
