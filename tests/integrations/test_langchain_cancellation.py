"""Ctrl-C, cancelled tasks and early ends in LangChain: what runs ends before its next layer."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading

import pytest
from integration_kit import FACTS
from langchain_core.caches import InMemoryCache
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda, RunnableParallel, RunnablePassthrough
from transformers import LlamaConfig, LlamaForCausalLM

from langchain_ragcachekit import ChatRagCache, RagCacheLLM
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
from ragcachekit import CancelScope, RagCache

LAYERS = 8
QUESTIONS = [f"{fact} Question {number}?" for number, fact in enumerate(FACTS)]
TEMPLATE = ChatPromptTemplate.from_messages([("system", "Answer from the context."), ("human", "{question}")])
BATCHED = [{"question": question} for question in QUESTIONS]


@pytest.fixture(scope="module")
def model(tiny_tokenizer):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = LlamaConfig(
        vocab_size=len(tiny_tokenizer),
        num_hidden_layers=LAYERS,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=tiny_tokenizer.eos_token_id,
        pad_token_id=tiny_tokenizer.pad_token_id,
        **sizes,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def rag(model, tiny_tokenizer, digests):
    with RagCache(model, tiny_tokenizer, policy="lego:4", cold="never", cache_dir=digests) as rag:
        yield rag
    assert threads_ended()


@pytest.fixture
def chat(rag):
    return ChatRagCache(cache=rag, max_tokens=1)


@pytest.fixture
def interrupt(monkeypatch):
    with interrupts(monkeypatch) as interrupt:
        yield interrupt


def batch_of_a_chain(chat, **options):
    return (TEMPLATE | chat | StrOutputParser()).batch(BATCHED, **options)


def completed_of(chat, **options):
    return list(chat.batch_as_completed(QUESTIONS, **options))


BATCHES = {
    "chat": lambda chat, **options: chat.batch(QUESTIONS, **options),
    "as completed": completed_of,
    "chain": batch_of_a_chain,
    "map": lambda chat, config=None: (TEMPLATE | chat).map().invoke(BATCHED, config),
    "retry": lambda chat, **options: chat.with_retry().batch(QUESTIONS, **options),
    "fallbacks": lambda chat, **options: chat.with_fallbacks([chat]).batch(QUESTIONS, **options),
    "exceptions returned": lambda chat, **o: chat.batch(QUESTIONS, return_exceptions=True, **o),
    "llm, as completed": lambda chat, **o: completed_of(RagCacheLLM(cache=chat.rag, max_tokens=1), **o),
}


@pytest.mark.parametrize("limit", [None, 2], ids=["all at once", "two at a time"])
@pytest.mark.parametrize("batch", BATCHES)
def test_an_interrupt_ends_a_batch(chat, model, interrupt, batch, limit):
    with watched(model, 3, interrupt) as layers, pytest.raises(KeyboardInterrupt):
        BATCHES[batch](chat, config={"max_concurrency": limit})
    assert layers.most_after <= 1
    assert layers.begun < len(QUESTIONS) * LAYERS
    assert [message.content for message in chat.batch(QUESTIONS)] == [
        chat.invoke(question).content for question in QUESTIONS
    ]


def test_an_interrupted_batch_leaves_no_answers_in_langchains_cache(rag, model, interrupt):
    answers = InMemoryCache()
    chat = ChatRagCache(rag=rag, cache=answers, max_tokens=1)
    with watched(model, 3, interrupt), pytest.raises(KeyboardInterrupt):
        chat.batch(QUESTIONS, {"max_concurrency": 2})
    plain = ChatRagCache(rag=rag, max_tokens=1)
    assert [m.content for m in chat.batch(QUESTIONS)] == [m.content for m in plain.batch(QUESTIONS)]


def test_a_batch_that_is_left_early_ends_what_runs_and_what_waits(chat, model, monkeypatch):
    chat.invoke(QUESTIONS[0])  # its first batch decodes prompts of its own to check the model
    cancelled, begun, late = cancellations(monkeypatch), [], []

    def hold_all_but_one(*_):
        begun.append(threading.get_ident())
        if len(begun) > 1:
            cancelled.wait(WAITED)

    hooks = [
        model.model.layers[0].register_forward_pre_hook(hold_all_but_one),
        model.model.layers[1].register_forward_pre_hook(lambda *_: late.append(len(begun) > 1)),
    ]
    try:
        results = chat.batch_as_completed(QUESTIONS, {"max_concurrency": 2})
        number, answer = next(results)
        results.close()
    finally:
        for hook in hooks:
            hook.remove()
    assert len(begun) <= 3, "the first, and two more at a time"
    assert len(late) == 1, "no other came to its second layer"
    assert answer.content == chat.invoke(QUESTIONS[number]).content


def test_an_interrupt_ends_an_answer(chat, model, interrupt):
    chain = TEMPLATE | chat | StrOutputParser()
    with watched(model, 3, interrupt) as layers, pytest.raises(KeyboardInterrupt):
        chain.invoke(BATCHED[0])
    assert layers.most_after <= 1
    assert chain.invoke(BATCHED[0]) == "".join(chain.stream(BATCHED[0]))


def test_an_interrupt_ends_a_stream(chat, model, monkeypatch):
    chain = TEMPLATE | chat | StrOutputParser()
    with monkeypatch.context() as patch:
        interrupt = interrupted_reader(patch)
        with watched(model, 3, interrupt) as layers, pytest.raises(KeyboardInterrupt):
            list(chain.stream(BATCHED[0]))
    assert layers.most_after <= 1
    assert chain.invoke(BATCHED[0]) == "".join(chain.stream(BATCHED[0]))


@pytest.mark.parametrize("chain", ["parallel", "assign"])
def test_a_chain_with_threads_of_its_own_ends_in_a_scope(chat, model, interrupt, chain):
    answer = RunnableLambda(lambda given: given["question"]) | chat
    if chain == "parallel":
        whole = RunnableParallel(one=answer, two=answer)
    else:
        whole = RunnablePassthrough.assign(answer=answer)
    with (
        watched(model, 3, interrupt) as layers,
        pytest.raises(KeyboardInterrupt),
        CancelScope(on_interrupt=True),
    ):
        whole.invoke(BATCHED[0])
    assert layers.most_after <= 1


async def first(pieces):
    async with contextlib.aclosing(pieces):
        return await anext(pieces)


TASKS = {
    "ainvoke": lambda chat: chat.ainvoke(QUESTIONS[0]),
    "astream": lambda chat: first(chat.astream(QUESTIONS[0])),
    "abatch": lambda chat: chat.abatch(QUESTIONS[:3]),
    "chain.ainvoke": lambda chat: (TEMPLATE | chat).ainvoke(BATCHED[0]),
    "chain.abatch": lambda chat: (TEMPLATE | chat).abatch(BATCHED[:3]),
    "llm.ainvoke": lambda chat: RagCacheLLM(cache=chat.rag).ainvoke(QUESTIONS[0]),
    "llm.abatch": lambda chat: RagCacheLLM(cache=chat.rag).abatch(QUESTIONS),
}


@pytest.mark.parametrize("call", TASKS)
async def test_cancelling_a_task_ends_its_forwards(chat, model, monkeypatch, call):
    """One prompt at a time is prefilled; the next may begin, and ends in its first layer."""
    await chat.ainvoke(QUESTIONS[0])  # its first batch decodes prompts of its own to check the model
    cancelled, begun, late = cancellations(monkeypatch), [], []
    inside, loop = asyncio.Event(), asyncio.get_running_loop()

    def hold(*_):
        begun.append(threading.get_ident())
        if len(begun) == 1:
            loop.call_soon_threadsafe(inside.set)
        cancelled.wait(WAITED)

    hooks = [
        model.model.layers[0].register_forward_pre_hook(hold),
        model.model.layers[1].register_forward_pre_hook(lambda *_: late.append(threading.get_ident())),
    ]
    try:
        task = asyncio.ensure_future(TASKS[call](chat))
        await asyncio.wait_for(inside.wait(), LONG)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await streams_ended()
    finally:
        for hook in hooks:
            hook.remove()
    assert len(begun) <= 2
    assert late == []
    assert chat.invoke(QUESTIONS[0]).content


PROGRAM = """
import signal, sys, threading
from layer_kit import watched
from speaking import byte_level, speaker
from langchain_ragcachekit import ChatRagCache
from ragcachekit import CancelScope, RagCache

signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell runs in the background
model = speaker(num_hidden_layers=30, max_position_embeddings=1024)
cancelled, cancel = threading.Event(), CancelScope.cancel
CancelScope.cancel = lambda scope: (cancel(scope), cancelled.set())

def compute():
    print("computing", flush=True)
    cancelled.wait(600)  # a machine that stands still for a while ends no wait

rag = RagCache(model, byte_level(), cold="never", cache_dir=sys.argv[1])
with watched(model, 2, compute) as layers:
    try:
        ChatRagCache(cache=rag, max_tokens=1).batch(["Where does the river flow?"] * 8)
    except KeyboardInterrupt:
        print("interrupted", layers.most_after, flush=True)
"""


@pytest.mark.skipif(os.name != "posix", reason="another process is interrupted by a signal")
def test_a_process_that_is_interrupted_in_a_batch_ends(tmp_path):
    arguments = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    paths = os.pathsep.join(path for path in sys.path if path)
    environment, pipe = {**os.environ, "PYTHONPATH": paths}, subprocess.PIPE
    with subprocess.Popen(arguments, stdout=pipe, stderr=pipe, text=True, env=environment) as process:
        assert process.stdout.readline() == "computing\n"
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=120)
    words = [word for line in out.splitlines() if line.startswith("interrupted") for word in line.split()]
    assert words[:1] == ["interrupted"], (out, errors)
    assert int(words[1]) <= 1, (out, errors)
    assert process.returncode == 0, (out, errors)
