"""What fails ends the request that it concerns, or the batch, and never the queue."""

import pytest
from transformers.generation.streamers import BaseStreamer

from engine_kit import EXACT, PROMPT, ids, warmed
from families import greedy, plain
from queue_kit import LONG, fail_next, held
from ragcachekit import RagCache
from ragcachekit.engine.scheduler import CacheAwareOrder
from ragcachekit.errors import EngineError

ASKED = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": -1}


@pytest.fixture
def rag():
    with warmed("llama", PROMPT, EXACT, policy="reuse") as rag:
        rag.after_answer.cold = "never"
        yield rag


class Exchanging(BaseStreamer):
    """Exchanges the model's attention once it has seen the prompt and ``after`` tokens."""

    def __init__(self, model, after):
        self._model, self._left = model, after + 1

    def put(self, value):
        self._left -= 1
        if not self._left:
            self._model.set_attn_implementation("sdpa")

    def end(self):
        pass


def outcome(request):
    """The answer's tokens, or the error."""
    try:
        return request.result(LONG).token_ids
    except BaseException as error:
        return error


def usable(rag: RagCache) -> None:
    assert rag.submit(PROMPT, **ASKED).result(LONG).token_ids == rag.generate(PROMPT, **ASKED).token_ids
    assert rag.queue.drain(LONG)
    assert not rag.queue.runner.runs
    assert not rag.queue.runner.decoder.active


def test_a_changed_model_is_not_decoded_in_the_batch(rag):
    rag.submit(PROMPT, **ASKED).result(LONG)
    rag.model.set_attn_implementation("sdpa")
    answer = rag.submit(PROMPT, **ASKED).result(LONG)
    assert answer.token_ids == greedy(plain("llama"), ids(PROMPT), 6, eos_token_id=-1)
    assert "the model changed" in answer.report.link.notes[-1]


def test_attention_exchanged_between_two_tokens_is_an_error_and_no_wrong_token(rag):
    request = rag.submit(PROMPT, streamer=Exchanging(rag.model, after=3), **ASKED)
    with pytest.raises(EngineError, match="attention was exchanged"):
        request.result(LONG)
    assert "the model changed" in rag.submit(PROMPT, **ASKED).result(LONG).report.link.notes[-1]


def test_what_fails_twice_is_the_error_of_that_request_alone(rag):
    fail_next(rag.queue.runner.decoder, "begin", RuntimeError("torn"), times=2)
    with held(rag) as turns:
        requests = [rag.submit(prompt, **ASKED) for prompt in (PROMPT, EXACT)]
    found = {request: outcome(request) for request in requests}
    assert [str(found[turns[0]]), len(found[turns[1]])] == ["torn", 6]
    assert rag.queue.stats().failed == 1
    usable(rag)


@pytest.mark.parametrize("times", [1, 2])
def test_a_step_that_fails_is_done_again_and_then_the_error_of_all_in_the_batch(rag, times):
    """RAGCache, section 6: what failed after its first token goes on from the KV that it has."""
    failed = []

    def fails(model, given, output):
        """After all rows of the step were written."""
        if len(output.logits) == 3 and len(failed) < times:
            failed.append(RuntimeError("out of memory"))
            raise failed[-1]

    with rag.model.register_forward_hook(fails):
        with held(rag):
            requests = [rag.submit(PROMPT, **ASKED) for _ in range(6)]
        found = [outcome(request) for request in requests]
    assert [error.__cause__ for error in found if isinstance(error, EngineError)] == failed[1:] * 3
    assert found.count(rag.generate(PROMPT, **ASKED).token_ids) == (6 if times == 1 else 3)
    usable(rag)


@pytest.mark.parametrize("where", ["begin", "answer"])
def test_whatever_one_request_raises_ends_it_alone(rag, where):
    runner = rag.queue.runner
    owner, name = {"begin": (runner.decoder, "begin"), "answer": (rag.after_answer, "submit")}[where]
    with held(rag):
        requests = [rag.submit(PROMPT, **ASKED) for _ in range(4)]
        fail_next(owner, name, SystemExit())
    found = [outcome(request) for request in requests]
    failed = [one for one in found if isinstance(one, SystemExit)]
    assert len(failed) == rag.queue.stats().failed == 1
    assert [len(one) for one in found if one not in failed] == [6] * 3
    usable(rag)


@pytest.mark.parametrize("where", ["choice", "prefetch", "step"])
def test_a_dying_thread_answers_everything_and_the_next_request_starts_another(rag, where, monkeypatch):
    runner = rag.queue.runner
    owner, name = {
        "choice": (CacheAwareOrder, "best"),
        "prefetch": (runner, "prefetch"),
        "step": (runner.decoder, "step"),
    }[where]
    monkeypatch.setattr(owner, name, getattr(owner, name))  # put back afterwards
    with held(rag):
        requests = [rag.submit(PROMPT, **ASKED) for _ in range(4)]
        fail_next(owner, name, SystemExit())
    for error in map(outcome, requests):
        assert isinstance(error, EngineError)
        assert isinstance(error.__cause__, SystemExit)
    assert rag.queue.drain(LONG)
    assert (rag.queue.waiting, rag.queue.running) == (0, 0)
    usable(rag)
