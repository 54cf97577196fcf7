"""What fails ends the request that it concerns, or the batch, and never the queue."""

from __future__ import annotations

import os

import pytest
from transformers.generation.streamers import BaseStreamer

from engine_kit import EXACT, PROMPT, ids, warmed
from families import greedy, plain
from queue_kit import LONG, fail_next, held
from ragcachekit import RagCache
from ragcachekit.errors import Closed, EngineError

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


def usable(rag: RagCache) -> None:
    assert rag.submit(PROMPT, **ASKED).result(LONG).token_ids == rag.generate(PROMPT, **ASKED).token_ids
    assert rag.queue.drain(LONG)
    assert not rag.queue.runner.runs
    assert not rag.queue.runner.decoder.active


@pytest.mark.parametrize("where", ["plan", "link"])
def test_a_failed_link_is_computed_in_full(rag, where, caplog):
    begin = rag.queue.runner.decoder
    owner, name = {"plan": (rag.components.planner, "plan"), "link": (begin, "begin")}[where]
    fail_next(owner, name, RuntimeError("torn"))
    answer = rag.submit(PROMPT, **ASKED).result(LONG)
    assert answer.token_ids == greedy(plain("llama"), ids(PROMPT), 6, eos_token_id=-1)
    assert "torn" in answer.report.link.fallback
    assert answer.report.link.reused_tokens == 0
    assert "computed in full" in caplog.text
    usable(rag)


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
    errors = []
    for request in requests:
        try:
            request.result(LONG)
        except RuntimeError as error:
            errors.append((request, str(error)))
    assert errors == [(turns[0], "torn")]
    assert rag.queue.stats().failed == 1
    usable(rag)


def test_a_streamer_that_fails_ends_its_own_request(rag):
    class Failing:
        def put(self, value):
            if value.numel() == 1:
                raise LookupError("full")

        def end(self):
            pass

    with held(rag):
        bad, good = rag.submit(PROMPT, streamer=Failing(), **ASKED), rag.submit(PROMPT, **ASKED)
    with pytest.raises(LookupError):
        bad.result(LONG)
    assert good.result(LONG).token_ids
    usable(rag)


def test_a_failed_step_is_the_error_of_all_in_the_batch(rag):
    with held(rag):
        requests = [rag.submit(PROMPT, **ASKED) for _ in range(6)]
        decoder, step = rag.queue.runner.decoder, rag.queue.runner.decoder.step
        failed = []

        def fails():
            if len(decoder.active) == 3 and not failed:
                failed.append(RuntimeError("out of memory"))
                raise failed[0]
            return step()

        decoder.step = fails
    answers, causes = set(), []
    for request in requests:
        try:
            answers.add(request.result(LONG).token_ids)
        except EngineError as error:
            causes.append(error.__cause__)
    assert causes == failed * 3
    assert answers == {rag.generate(PROMPT, **ASKED).token_ids}
    usable(rag)


@pytest.mark.parametrize("where", ["begin", "answer"])
def test_whatever_one_request_raises_ends_it_alone(rag, where):
    runner = rag.queue.runner
    owner, name = {"begin": (runner.decoder, "begin"), "answer": (rag.after_answer, "submit")}[where]
    with held(rag):
        requests = [rag.submit(PROMPT, **ASKED) for _ in range(4)]
        fail_next(owner, name, SystemExit())
    failed = 0
    for request in requests:
        try:
            assert len(request.result(LONG).token_ids) == 6
        except SystemExit:
            failed += 1
    assert failed == rag.queue.stats().failed == 1
    usable(rag)


@pytest.mark.parametrize("where", ["choice", "prefetch", "step"])
def test_a_dying_thread_answers_everything_and_the_next_request_starts_another(rag, where):
    runner = rag.queue.runner
    owner, name = {
        "choice": (rag.queue._order, "best"),
        "prefetch": (runner, "prefetch"),
        "step": (runner.decoder, "step"),
    }[where]
    with held(rag):
        requests = [rag.submit(PROMPT, **ASKED) for _ in range(4)]
        fail_next(owner, name, SystemExit())
    for request in requests:
        with pytest.raises(EngineError) as caught:
            request.result(LONG)
        assert isinstance(caught.value.__cause__, SystemExit)
    assert rag.queue.drain(LONG)
    assert (rag.queue.waiting, rag.queue.running) == (0, 0)
    usable(rag)


def test_a_store_that_cannot_say_what_it_has_costs_the_order_alone(rag):
    rag.components.store.in_memory = lambda _: 1 / 0
    usable(rag)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_is_refused(rag):
    with held(rag):
        request, queue = rag.submit(PROMPT, **ASKED), rag.queue
        child = os.fork()
        if not child:
            refused = 0
            for call in (lambda: request.result(), lambda: queue.drain(), lambda: rag.submit(PROMPT)):
                try:
                    call()
                except Closed:
                    refused += 1
            os._exit(0 if refused == 3 else 1)
        assert os.waitpid(child, 0)[1] == 0
    assert request.result(LONG).token_ids
