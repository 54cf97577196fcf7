"""Cancellation: every forward of a request ends between two layers or tokens, and nothing stays behind."""

import asyncio
import contextlib
import gc
import threading

import pytest

from engine_kit import PROMPT, chunk, stored_in, text
from layer_kit import LONG, WAITED, cancellations, hooks_of, interrupts, streams_ended, watched
from ragcachekit import (
    Cancelled,
    CancelScope,
    Prompt,
    RagCache,
    SimilarChunks,
    TreeConfig,
    agenerate,
    astream,
    to_thread,
)
from speaking import ONE, THREE, TWO, byte_level, speaker

LAYERS = 5
ASKED = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": -1}
OTHER = Prompt([text(9, 1), chunk(25, 3), chunk(33, 2), text(6, 5)])
FACTS = [ONE, TWO, THREE]
QUESTION = "Answer from the context.\n" + "\n\n".join(FACTS) + "\nWhere does the river flow?"


@pytest.fixture(scope="module")
def model():
    return speaker(num_hidden_layers=LAYERS, max_position_embeddings=2048)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("digests")


@pytest.fixture
def make(model, folder):
    with contextlib.ExitStack() as opened:

        def new(**options):
            options = {"cold": "never", "policy": "lego:4", "encoder": "standalone", **options}
            return opened.enter_context(RagCache(model, byte_level(), cache_dir=folder, **options))

        yield new
    assert not [t.name for t in threading.enumerate() if t.name.startswith("ragcachekit-scope")]


@pytest.fixture
def interrupt(monkeypatch):
    with interrupts(monkeypatch) as interrupt:
        yield interrupt


def ours(caplog):
    return [record.message for record in caplog.records if record.name.startswith("ragcachekit")]


def set_event():
    event = threading.Event()
    return event, event.set


WAYS = {
    "full": ({"policy": "full"}, {}, 3),
    "cold": ({"policy": "lego:4"}, {}, 3),
    "linked": ({"policy": "lego:4", "cold": "now"}, {}, 3),
    "guided, while it looks": ({"policy": "query:0.3", "cold": "now"}, {}, 3),
    "guided, afterwards": ({"policy": "query:0.3", "cold": "now"}, {}, LAYERS + 3),
    "layer-wise": ({"policy": "cacheblend:0.3", "cold": "now"}, {}, 3),
    "ahead": ({"policy": "lego:4", "cold": "now"}, {"no_repeat_ngram_size": 50}, 3),
    "beams": ({"policy": "lego:4", "cold": "now"}, {"num_beams": 2}, 3),
    "tree": ({"policy": "lego:4", "cold": "now", "tree": TreeConfig(host_bytes=1 << 24)}, {}, 3),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_prefill_ends_before_its_next_layer(make, model, way):
    engine, options, at = WAYS[way]
    rag = make(**engine)
    if engine.get("cold"):
        rag.generate(PROMPT, max_new_tokens=1)
        rag.generate(PROMPT, max_new_tokens=1)  # a layer-wise policy leaves its hooks at the first linked one
    hooks, whole = hooks_of(model), rag.generate(PROMPT, **ASKED, **options)
    entries = [record.entries for record in rag.stats()]
    event, cancel = set_event()
    with watched(model, at, cancel) as layers:
        cut = rag.generate(PROMPT, cancel=event, **ASKED, **options)
    assert layers.most_after <= 1
    assert (cut.report.finish_reason, cut.token_ids, cut.text) == ("cancelled", (), "")
    assert [record.entries for record in rag.stats()] == entries
    assert hooks_of(model) == hooks
    assert rag.generate(PROMPT, **ASKED, **options).token_ids == whole.token_ids


def test_an_answer_ends_after_its_token_and_keeps_those_before(make, model):
    rag, (event, cancel) = make(), set_event()
    whole = rag.generate(PROMPT, **ASKED)
    with watched(model, 2 * LAYERS + 3, cancel) as layers:  # in the forward of the third token
        cut = rag.generate(PROMPT, cancel=event, **ASKED)
    assert layers.most_after <= LAYERS
    assert cut.report.finish_reason == "cancelled"
    assert cut.token_ids == whole.token_ids[:3]


def test_encoding_behind_an_answer_ends_too(make, model, caplog):
    rag, (event, cancel) = make(cold="now"), set_event()
    answer = LAYERS * ASKED["max_new_tokens"]
    with watched(model, answer + 3, cancel) as layers:
        whole = rag.generate(PROMPT, cancel=event, **ASKED)
    assert layers.most_after <= 2, "one per group of chunks"
    assert whole.report.finish_reason == "length"
    assert [key.encoding for key in stored_in(rag)] == ["prefix"], "copied without a forward"
    assert not ours(caplog), "a cancelled job has not failed"


CALLS = {
    "generate": lambda rag: rag.generate(PROMPT, **ASKED),
    "generate_batch": lambda rag: rag.generate_batch([PROMPT, OTHER], **ASKED),
    "stream": lambda rag: list(rag.stream(QUESTION, **ASKED)),
    "link": lambda rag: rag.link(PROMPT),
    "encode": lambda rag: rag.encode(FACTS),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_call_in_a_cancelled_scope_raises(make, model, call):
    rag = make(cold="now")
    rag.generate(PROMPT, **ASKED)
    whole = rag.generate(PROMPT, **ASKED)
    assert rag.stats()[0].entries == 3
    with CancelScope() as scope, watched(model, 3, scope.cancel) as layers, pytest.raises(Cancelled):
        CALLS[call](rag)
    assert layers.most_after <= 1
    assert rag.stats()[0].entries == 3
    with watched(model, 1, lambda: None) as layers, scope, pytest.raises(Cancelled):
        rag.generate(PROMPT, **ASKED)  # not begun at all
    assert layers.begun == 0
    assert rag.generate(PROMPT, **ASKED).token_ids == whole.token_ids


ENCODERS = {
    "standalone": {},
    "sinks": {"encoder": "sinks:4"},
    "system": {"encoder": "system"},
    "similar": {"encoder": "similar:2", "neighbours": SimilarChunks(FACTS, [[1.0], [1.0], [1.0]])},
}


@pytest.mark.parametrize(
    ("encoder", "forwards"),
    [("standalone", 0), ("standalone", 2), ("sinks", 2), ("system", 2), ("similar", 0), ("similar", 2)],
)
def test_encode_keeps_whole_entries_only(make, model, encoder, forwards, monkeypatch):
    options = ENCODERS[encoder]
    system = {} if encoder in ("standalone", "sinks") else {"system": "Answer from the context.\n"}
    monkeypatch.setattr("ragcachekit.encode.encoders.BATCH_TOKENS", 1)  # a forward per chunk
    whole = make(**options)
    whole.encode(FACTS, **system)
    rag = make(**options)
    with (
        CancelScope() as scope,
        watched(model, forwards * LAYERS + 3, scope.cancel) as layers,
        pytest.raises(Cancelled),
    ):
        rag.encode(FACTS, **system)
    assert layers.most_after <= 1
    assert rag.stats()[0].entries == forwards
    assert rag.encode(FACTS, **system) == whole.encode(FACTS, **system)
    assert rag.stats()[0].entries == whole.stats()[0].entries
    assert rag.generate(QUESTION, **ASKED).token_ids == whole.generate(QUESTION, **ASKED).token_ids


@pytest.mark.parametrize("leave", ["close", "error", "drop"])
def test_leaving_a_stream_ends_its_prefill(make, model, leave):
    rag, inside, left = make(), threading.Event(), threading.Event()

    def wait():
        inside.set()
        assert left.wait(LONG)

    with watched(model, 3, wait) as layers:
        stream = rag.stream(QUESTION, **ASKED)
        assert inside.wait(LONG)
        if leave == "close":
            threading.Timer(0.05, left.set).start()
            stream.close()
            assert stream.answer.report.finish_reason == "cancelled"
        elif leave == "error":
            threading.Timer(0.05, left.set).start()
            with pytest.raises(LookupError), stream:
                raise LookupError
        else:
            del stream
            gc.collect()
            left.set()
        assert rag.queue.drain(LONG)
    assert layers.most_after <= 1


async def first_piece(rag):
    async with astream(rag, QUESTION, **ASKED) as stream:
        await anext(stream)


TASKS = {
    "agenerate": lambda rag: agenerate(rag, QUESTION, **ASKED),
    "astream": first_piece,
    "encode": lambda rag: to_thread(rag.encode, FACTS),
    "generate_batch": lambda rag: to_thread(rag.generate_batch, [QUESTION, FACTS[0]], **ASKED),
}


@pytest.mark.parametrize("call", TASKS)
async def test_cancelling_a_task_ends_its_forward(make, model, monkeypatch, call):
    rag, inside, cancelled = make(), asyncio.Event(), cancellations(monkeypatch)
    loop = asyncio.get_running_loop()

    def compute():
        loop.call_soon_threadsafe(inside.set)
        cancelled.wait(WAITED)

    with watched(model, 3, compute) as layers:
        task = asyncio.ensure_future(TASKS[call](rag))
        await asyncio.wait_for(inside.wait(), LONG)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await streams_ended()
    assert layers.most_after <= 1
    assert rag.stats()[0].entries == 0
    assert rag.generate(QUESTION, **ASKED).text


def test_close_ends_background_encoding_before_its_next_layer(make, model, caplog):
    rag, encoding = make(cold="background", encode_after=1), threading.Event()
    closed = rag.components.background.closed

    def wait():
        encoding.set()
        assert closed.wait(LONG)

    with watched(model, 6 * LAYERS + 3, wait) as layers:
        rag.generate(PROMPT, **ASKED)
        assert encoding.wait(LONG)
        rag.close()
    assert layers.most_after <= 1
    assert not [t for t in threading.enumerate() if t.name == "ragcachekit-background"]
    assert not ours(caplog)


def test_an_interrupt_ends_what_runs_in_a_worker_thread(make, model, interrupt):
    rag = make()
    with watched(model, 3, interrupt) as layers, pytest.raises(KeyboardInterrupt):
        CancelScope().run(rag.generate, PROMPT, **ASKED)
    assert layers.most_after <= 1
    assert rag.generate(PROMPT, **ASKED).token_ids
