"""What a request's own code raises is that request's error, and it may not wait for its own thread."""

import asyncio

import pytest
import torch
from transformers import LogitsProcessor

from engine_kit import EXACT, PROMPT, warmed
from queue_kit import LONG, held
from ragcachekit import QueueConfig, Request, agenerate, astream
from ragcachekit.errors import EngineError
from soak_kit import soaked

ASKED = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": -1}


@pytest.fixture(scope="module")
def rag():
    with warmed("llama", PROMPT, EXACT, policy="reuse") as rag:
        rag.after_answer.cold = "never"
        yield rag


class Streamer:
    """Calls ``then`` at its ``at``-th put (the first is the prompt), or at its end."""

    def __init__(self, then, at=3):
        self._then, self._at, self._puts = then, at, 0

    def put(self, value):
        self._puts += 1
        if self._puts == self._at:
            self._then()

    def end(self):
        if self._at == "end":
            self._then()


class Observing(LogitsProcessor):
    """A processor that a batch runs; calls ``then`` at the third token."""

    def __init__(self, then):
        self._then, self._calls = then, 0

    def __call__(self, input_ids, scores):
        self._calls += 1
        if self._calls == 3:
            self._then()
        return scores


def criterion(then):
    def call(input_ids, scores, **_):
        then()
        return torch.zeros(1, dtype=torch.bool)

    return call


def processor(then):
    def call(input_ids, scores):
        then()
        return scores

    return call


USERS_CODE = {
    "put of the prompt": lambda then: {"streamer": Streamer(then, 1)},
    "put of the first token": lambda then: {"streamer": Streamer(then, 2)},
    "put of a later token": lambda then: {"streamer": Streamer(then, 4)},
    "end of the answer": lambda then: {"streamer": Streamer(then, "end")},
    "processor": lambda then: {"logits_processor": [processor(then)]},
    "processor in the batch": lambda then: {"logits_processor": [Observing(then)]},
    "criterion": lambda then: {"stopping_criteria": [criterion(then)]},
}
ERRORS = [asyncio.CancelledError("its own"), SystemExit(3), KeyboardInterrupt("its own")]


EVERY = "put of a later token", "processor in the batch", "criterion"
CASES = [(where, error) for where in EVERY for error in ERRORS]
CASES += zip([where for where in USERS_CODE if where not in EVERY], [*ERRORS, ERRORS[0]], strict=True)
CASES += [("put of a later token", LookupError("full"))]


def raiser(error):
    def then():
        raise error

    return then


@pytest.mark.parametrize(("where", "error"), soaked(CASES, *zip(EVERY, ERRORS, strict=True), *CASES[9:]))
def test_it_is_the_error_of_its_own_request_alone(rag, where, error):
    names = ("default", "other", "default", "other", "default", "third")
    want = {name: rag.generate(PROMPT, namespace=name, **ASKED).token_ids for name in names}
    before = rag.queue.stats()
    requests = [rag.submit(PROMPT, namespace=name, **ASKED) for name in names[:2]]
    with held(rag):
        requests += [rag.submit(PROMPT, namespace=name, **ASKED) for name in names[2:4]]
        bad = rag.submit(PROMPT, **USERS_CODE[where](raiser(error)), **ASKED)
        requests += [rag.submit(PROMPT, namespace=name, **ASKED) for name in names[4:]]
    with pytest.raises(type(error)) as caught:
        bad.result(LONG)
    assert caught.value is error
    assert [request.result(LONG).token_ids for request in requests] == [want[name] for name in names]
    assert rag.queue.drain(LONG)
    stats = rag.queue.stats()
    assert (stats.failed, stats.done) == (before.failed + 1, before.done + 6)
    assert not rag.queue.runner.runs
    assert not rag.queue.runner.decoder.active


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
async def test_in_asyncio_it_ends_neither_the_task_nor_the_loop(rag, error):
    # Of these, a task would look cancelled by the first, and the next two would end the loop.
    options = {"streamer": Streamer(raiser(error)), **ASKED}
    bad, good = agenerate(rag, PROMPT, **options), agenerate(rag, PROMPT, **ASKED)
    failed, answer = await asyncio.gather(bad, good, return_exceptions=True)
    assert isinstance(failed, EngineError)
    assert failed.__cause__ is error
    assert len(answer.token_ids) == 8
    async with astream(rag, PROMPT, logits_processor=[Observing(raiser(error))], **ASKED) as stream:
        with pytest.raises(EngineError) as caught:
            async for _ in stream:
                pass
        assert caught.value.__cause__ is error
        with pytest.raises(EngineError):
            stream.answer  # noqa: B018


async def streamed(rag):
    async with astream(rag, EXACT, **ASKED) as stream:
        return [piece async for piece in stream]


WAITS = {
    "result": lambda rag: rag.submit(EXACT, **ASKED).result(),
    "result for a time": lambda rag: rag.submit(EXACT, **ASKED).result(LONG),
    "stream": lambda rag: list(rag.submit(EXACT, **ASKED).stream()),
    "generate": lambda rag: rag.generate(EXACT, **ASKED),
    "batch": lambda rag: rag.generate_batch([EXACT], **ASKED),
    "agenerate": lambda rag: asyncio.run(agenerate(rag, EXACT, **ASKED)),
    "astream": lambda rag: asyncio.run(streamed(rag)),
    "drain": lambda rag: rag.queue.drain(),
    "flush": lambda rag: rag.flush(),
}


def caught_from(call, seen):
    """Calls ``call`` and keeps what it raises, as a user's code might."""

    def then():
        try:
            seen.append(call())
        except BaseException as error:
            seen.append(error)

    return then


@pytest.mark.parametrize("how", WAITS)
@pytest.mark.parametrize("where", ["put of a later token", "callback"])
def test_waiting_for_its_own_thread_is_an_error_at_once(rag, how, where):
    seen: list[object] = []
    then = caught_from(lambda: WAITS[how](rag), seen)
    with held(rag):
        if where == "callback":
            first = rag.submit(PROMPT, **ASKED)
            first.add_done_callback(lambda _: then())
        else:
            first = rag.submit(PROMPT, **USERS_CODE[where](then), **ASKED)
    assert len(first.result(LONG).token_ids) == 8
    assert rag.submit(PROMPT, **ASKED).result(LONG).token_ids == first.result().token_ids
    assert rag.queue.drain(LONG)
    assert seen
    for error in seen:
        assert isinstance(error, RuntimeError)
        assert "add_done_callback" in str(error)


def test_a_full_queue_is_not_waited_for_in_its_own_thread():
    seen: list[object] = []
    with warmed("llama", PROMPT, queue=QueueConfig(max_batch=1, max_waiting=1)) as rag:
        then = caught_from(lambda: rag.submit(PROMPT, wait=True, **ASKED), seen)
        first = rag.submit(
            PROMPT, streamer=Streamer(lambda: (waiting.append(rag.submit(PROMPT, **ASKED)), then())), **ASKED
        )
        waiting: list[Request] = []
        assert first.result(LONG).token_ids == waiting[0].result(LONG).token_ids
    assert [type(error) for error in seen] == [RuntimeError]


def test_what_does_not_wait_is_allowed_there(rag):
    want, requests, answers = rag.generate(EXACT, **ASKED).token_ids, [], []

    def then():
        requests.append(rag.submit(EXACT, wait=True, **ASKED))
        requests[-1].add_done_callback(lambda request: answers.append(request.result()))
        rag.submit(PROMPT, **ASKED).cancel()
        assert rag.queue.stats().running == 1
        with pytest.raises(TimeoutError):
            requests[-1].result(0)

    first = rag.submit(PROMPT, streamer=Streamer(then), **ASKED)
    first.add_done_callback(lambda request: "".join(request.stream()))
    assert len(first.result(LONG).token_ids) == 8
    assert requests[0].result(LONG).token_ids == want
    assert rag.queue.drain(LONG)
    assert [answer.token_ids for answer in answers] == [want]
