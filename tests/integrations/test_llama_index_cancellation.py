"""Ctrl-C, cancelled tasks and early ends in LlamaIndex: what runs ends before its next layer."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from llama_index.core.base.llms.types import ChatMessage

from layer_kit import (
    LONG,
    WAITED,
    cancellations,
    interrupted_reader,
    interrupts,
    streams_ended,
    threads_ended,
    watched,
)
from llama_index_ragcachekit import RagCacheLLM
from ragcachekit import RagCache
from speaking import byte_level, speaker

LAYERS = 8
QUESTION = "Berlin is the capital of Germany. The river Spree flows in Berlin. Where does the river flow?"
MESSAGES = [ChatMessage(content=QUESTION)]


@pytest.fixture(scope="module")
def model():
    return speaker(num_hidden_layers=LAYERS, max_position_embeddings=1024)


@pytest.fixture
def llm(model, digests):
    with RagCache(model, byte_level(), policy="lego:4", cold="never", cache_dir=digests) as rag:
        yield RagCacheLLM(cache=rag, max_tokens=4)
    assert threads_ended()


CALLS = {"complete": lambda llm: llm.complete(QUESTION), "chat": lambda llm: llm.chat(MESSAGES)}
STREAMS = {
    "stream_complete": lambda llm: list(llm.stream_complete(QUESTION)),
    "stream_chat": lambda llm: list(llm.stream_chat(MESSAGES)),
}


@pytest.mark.parametrize("call", CALLS)
def test_an_interrupt_ends_an_answer(llm, model, monkeypatch, call):
    with (
        interrupts(monkeypatch) as interrupt,
        watched(model, 3, interrupt) as layers,
        pytest.raises(KeyboardInterrupt),
    ):
        CALLS[call](llm)
    assert layers.most_after <= 1
    assert str(llm.complete(QUESTION))


@pytest.mark.parametrize("call", STREAMS)
def test_an_interrupt_ends_a_stream(llm, model, monkeypatch, call):
    with monkeypatch.context() as patch:
        interrupt = interrupted_reader(patch)
        with watched(model, 3, interrupt) as layers, pytest.raises(KeyboardInterrupt):
            STREAMS[call](llm)
    assert layers.most_after <= 1
    assert str(llm.complete(QUESTION)) == "".join(r.delta for r in llm.stream_complete(QUESTION))


async def first(pieces):
    async with contextlib.aclosing(await pieces) as opened:
        return await anext(opened)


TASKS = {
    "acomplete": lambda llm: llm.acomplete(QUESTION),
    "achat": lambda llm: llm.achat(MESSAGES),
    "astream_complete": lambda llm: first(llm.astream_complete(QUESTION)),
    "astream_chat": lambda llm: first(llm.astream_chat(MESSAGES)),
}


@pytest.mark.parametrize("call", TASKS)
async def test_cancelling_a_task_ends_its_forward(llm, model, monkeypatch, call):
    inside, cancelled, loop = asyncio.Event(), cancellations(monkeypatch), asyncio.get_running_loop()

    def compute():
        loop.call_soon_threadsafe(inside.set)
        cancelled.wait(WAITED)

    with watched(model, 3, compute) as layers:
        task = asyncio.ensure_future(TASKS[call](llm))
        await asyncio.wait_for(inside.wait(), LONG)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await streams_ended()
    assert layers.most_after <= 1
    assert str(llm.complete(QUESTION))
