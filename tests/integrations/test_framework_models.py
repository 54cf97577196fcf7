"""What LangChain's and LlamaIndex's models share: options, reports, streams, cancellation, batches."""

import asyncio
import contextlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fake_engine import FakeEngine
from integration_kit import FACTS
from langchain_core.messages import HumanMessage
from llama_index.core.base.llms.types import ChatMessage, ImageBlock, TextBlock

from langchain_ragcachekit import ChatRagCache
from langchain_ragcachekit import RagCacheLLM as LangChainLLM
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
from llama_index_ragcachekit import RagCacheLLM as LlamaIndexLLM
from ragcachekit import DeadlineExceeded, RagCache
from snapshots_kit import hybrid_speaker
from soak_kit import soaked
from speaking import byte_level, speaker

TEXT = "it is in the north of the town by the sea ."
QUESTIONS = [f"{fact} Question {number}?" for number, fact in enumerate((*FACTS, *FACTS[:2]))]
IMAGE = {"type": "image", "url": "http://x"}


class LangChainChat:
    """How a chain asks LangChain's chat model."""

    kind: Any = ChatRagCache
    one_prompt = staticmethod(lambda text: [{"role": "user", "content": text}])

    def __init__(self, engine, **settings):
        self.model = self.kind(rag=engine, **settings)

    def ask(self, text, **options):
        return self.text(self.model.invoke(text, **options))

    async def aask(self, text, **options):
        return self.text(await self.model.ainvoke(text, **options))

    def stream(self, text, **options):
        pieces = self.model.stream(text, **options)
        with contextlib.closing(pieces):
            yield from map(self.text, pieces)

    async def astream(self, text, **options):
        async with contextlib.aclosing(self.model.astream(text, **options)) as pieces:
            async for piece in pieces:
                yield self.text(piece)

    def counts(self, text):
        usage = self.model.invoke(text).usage_metadata
        details = usage["input_token_details"]
        return {"in": usage["input_tokens"], "out": usage["output_tokens"], "cached": details["cache_read"]}

    def ask_of_an_image(self):
        return self.model.invoke([HumanMessage(["see", IMAGE])])

    @staticmethod
    def text(message):
        return message.content


class LangChainText(LangChainChat):
    """LangChain's language model for plain prompts."""

    kind = LangChainLLM
    one_prompt = staticmethod(lambda text: text)

    def counts(self, text):
        result = self.model.generate([text])
        used, info = result.llm_output["token_usage"], result.generations[0][0].generation_info
        return {"in": used["prompt_tokens"], "out": used["completion_tokens"], "cached": info["cache_read"]}

    @staticmethod
    def text(message):
        return message


class LlamaIndexChat(LangChainChat):
    """How a query engine asks LlamaIndex's model."""

    kind = LlamaIndexLLM

    def ask(self, text, **options):
        return self.text(self.model.chat([ChatMessage(content=text)], **options))

    async def aask(self, text, **options):
        return self.text(await self.model.achat([ChatMessage(content=text)], **options))

    def stream(self, text, **options):
        pieces = self.model.stream_chat([ChatMessage(content=text)], **options)
        with contextlib.closing(pieces):
            for piece in pieces:
                yield piece.delta

    async def astream(self, text, **options):
        opened = await self.model.astream_chat([ChatMessage(content=text)], **options)
        async with contextlib.aclosing(opened) as pieces:
            async for piece in pieces:
                yield piece.delta

    def counts(self, text):
        counts = self.model.chat([ChatMessage(content=text)]).additional_kwargs
        names = {"in": "prompt_tokens", "out": "completion_tokens", "cached": "cache_read_tokens"}
        return {name: counts[theirs] for name, theirs in names.items()}

    def ask_of_an_image(self):
        return self.model.chat([ChatMessage(blocks=[TextBlock(text="see"), ImageBlock(url="http://x")])])

    @staticmethod
    def text(message):
        return message.message.content


class LlamaIndexText(LlamaIndexChat):
    """LlamaIndex's model as it completes prompts."""

    def ask(self, text, **options):
        return self.model.complete(text, **options).text

    async def aask(self, text, **options):
        return (await self.model.acomplete(text, **options)).text

    def stream(self, text, **options):
        with contextlib.closing(self.model.stream_complete(text, **options)) as pieces:
            for piece in pieces:
                yield piece.delta

    async def astream(self, text, **options):
        opened = await self.model.astream_complete(text, **options)
        async with contextlib.aclosing(opened) as pieces:
            async for piece in pieces:
                yield piece.delta


ADAPTERS = (LangChainChat, LangChainText, LlamaIndexChat, LlamaIndexText)
GRADES = ("linked", "prefix")
CHATS = (LangChainChat, LlamaIndexChat)
EITHER = [(adapter, streamed) for adapter in ADAPTERS for streamed in (False, True)]


@pytest.fixture(params=ADAPTERS, ids=lambda adapter: adapter.__name__)
def adapter(request):
    return request.param


@pytest.fixture(params=CHATS, ids=lambda adapter: adapter.__name__)
def chat(request):
    return request.param


@pytest.mark.parametrize("temperature", [None, 0.0])
def test_no_temperature_is_greedy(adapter, temperature):
    engine = FakeEngine()
    adapter(engine, temperature=temperature, top_p=0.9, top_k=5).ask("hi")
    (call,) = engine.calls
    assert call == {
        "prompt": adapter.one_prompt("hi"), "namespace": None, "policy": None, "stop": None,
        "max_new_tokens": 256, "do_sample": False,
    }  # fmt: skip


def test_a_temperature_samples_and_one_call_overrides_the_settings(adapter):
    engine, extra = FakeEngine(), {"min_new_tokens": 2}
    model = adapter(engine, temperature=0.7, top_p=0.9, stop=["x"], namespace="a", generate_kwargs=extra)
    model.ask("hi")
    model.ask("hi", stop=["y"], temperature=0, max_tokens=3, namespace="b", policy="full", seed=1)
    first, second = engine.calls
    assert first | {"prompt": 0} == {
        "prompt": 0, "namespace": "a", "policy": None, "stop": ["x"], "max_new_tokens": 256,
        "do_sample": True, "temperature": 0.7, "top_p": 0.9, "min_new_tokens": 2,
    }  # fmt: skip
    assert second | {"prompt": 0} == {
        "prompt": 0, "namespace": "b", "policy": "full", "stop": ["y"], "max_new_tokens": 3,
        "do_sample": False, "min_new_tokens": 2, "seed": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_tokenz": 3}, r"unknown arguments max_tokenz; .*generate_kwargs"),
        ({"max_tokens": 0}, "greater than 0"),
        ({"temperature": -1}, "greater than or equal to 0"),
        ({"top_p": 1.5}, "less than or equal to 1"),
        ({"max_tokens": 1, "max_new_tokens": 1}, "max_new_tokens"),
    ],
)
def test_bad_settings_are_refused(adapter, settings, message):
    with pytest.raises(ValueError, match=message):
        adapter(FakeEngine(), **settings)


@pytest.mark.parametrize("engine", [None, object()])
def test_something_that_is_no_engine_is_refused(adapter, engine):
    with pytest.raises(ValueError, match="needs rag=RagCache"):
        adapter(engine)


def test_usage_counts_what_was_reused(adapter):
    engine = FakeEngine()
    engine.register(["Ada lives in Bern ."], namespace="a")
    prompt = "Context: Ada lives in Bern . Where ?"
    assert adapter(engine, namespace="a").counts(prompt) == {"in": 8, "out": 12, "cached": 5}
    assert adapter(engine, namespace="b").counts(prompt)["cached"] == 0


async def test_every_way_to_ask_gives_the_same_answer(adapter):
    model = adapter(FakeEngine())
    assert model.ask("hi") == await model.aask("hi") == TEXT
    pieces, apieces = list(model.stream("hi")), [piece async for piece in model.astream("hi")]
    assert "".join(pieces) == TEXT
    assert pieces == apieces
    assert len(pieces) == 13


def test_images_are_refused_by_the_name_of_their_block(chat):
    with pytest.raises(ValueError, match="'image'"):
        chat(FakeEngine()).ask_of_an_image()


def test_every_call_goes_through_the_queue_and_waits_there(adapter):
    engine = FakeEngine()
    adapter(engine).ask("a") if adapter is not LangChainText else None  # its prompts are a batch of their own
    list(adapter(engine).stream("a"))
    assert {call["wait"] for call in engine.submitted} == {True}


def test_leaving_a_stream_early_cancels_the_generation(adapter):
    engine = FakeEngine()
    stream = adapter(engine).stream("hi")
    assert next(stream) == "it"
    assert not engine.streams[0].cancelled.is_set()
    stream.close()
    assert engine.streams[0].cancelled.is_set()


def test_calls_at_the_same_time_are_decoded_together_and_answer_as_alone(adapter, rag):
    model, tokens = adapter(rag, max_tokens=10), 10
    expected = [model.ask(question) for question in QUESTIONS]

    def streamed(question):
        return "".join(model.stream(question))

    async def gathered():
        return await asyncio.gather(*map(model.aask, QUESTIONS))

    for ask in (lambda: list(pool.map(streamed, QUESTIONS)), lambda: asyncio.run(gathered())):
        before = rag.queue.stats()
        with ThreadPoolExecutor(len(QUESTIONS)) as pool:
            assert ask() == expected
        after = rag.queue.stats()
        assert after.submitted - before.submitted == len(QUESTIONS)
        assert after.steps - before.steps < len(QUESTIONS) * (tokens - 1) / 2, "two or more per step"


@pytest.mark.parametrize("rag", GRADES, indirect=True)
def test_every_call_takes_wait_and_a_deadline(adapter, rag):
    model = adapter(rag, max_tokens=4, generate_kwargs={"deadline": 60, "wait": False})
    whole = model.ask("Where is Bern?")
    assert "".join(model.stream("Where is Bern?")) == asyncio.run(model.aask("Where is Bern?")) == whole
    with pytest.raises(DeadlineExceeded):
        list(adapter(rag, generate_kwargs={"deadline": 0.0}).stream("Where is Bern?"))


@pytest.fixture(scope="module", params=soaked(GRADES, "linked"))
def layered(request):
    sizes = {"num_hidden_layers": 8, "max_position_embeddings": 1024}
    if request.param == "linked":
        return speaker(**sizes)
    types = ["linear_attention", "full_attention"] * 4
    return hybrid_speaker(**sizes, layer_types=types)


@pytest.fixture
def slow(layered, digests):
    """An engine of many layers, of which a test interrupts one."""
    with RagCache(layered, byte_level(), policy="lego:4", cold="never", cache_dir=digests) as rag:
        yield rag
    assert threads_ended()


QUESTION = "Berlin is the capital of Germany. The river Spree flows in Berlin. Where does the river flow?"


@pytest.mark.parametrize("streamed", [False, True])
def test_an_interrupt_ends_an_answer_before_its_next_layer(adapter, slow, layered, monkeypatch, streamed):
    model = adapter(slow, max_tokens=4)
    with monkeypatch.context() as patch, contextlib.ExitStack() as stack:
        interrupt = interrupted_reader(patch) if streamed else stack.enter_context(interrupts(patch))
        layers = stack.enter_context(watched(layered, 3, interrupt))
        with pytest.raises(KeyboardInterrupt):
            list(model.stream(QUESTION)) if streamed else model.ask(QUESTION)
    assert layers.most_after <= 1
    assert model.ask(QUESTION) == "".join(model.stream(QUESTION))


@pytest.mark.parametrize(("adapter", "streamed"), soaked(EITHER, *EITHER[1::4], *EITHER[2::4]))
async def test_cancelling_a_task_ends_its_forward(adapter, slow, layered, monkeypatch, streamed):
    model = adapter(slow, max_tokens=4)
    inside, cancelled, loop = asyncio.Event(), cancellations(monkeypatch), asyncio.get_running_loop()

    def compute():
        loop.call_soon_threadsafe(inside.set)
        cancelled.wait(WAITED)

    async def consume():
        return [piece async for piece in model.astream(QUESTION)] if streamed else await model.aask(QUESTION)

    with watched(layered, 3, compute) as layers:
        task = asyncio.ensure_future(consume())
        await asyncio.wait_for(inside.wait(), LONG)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await streams_ended()
    assert layers.most_after <= 1
    assert model.ask(QUESTION)
