"""What only LangChain asks of its models: message metadata, events, tracing, its own cache, copies."""

import asyncio
import threading
import time

import pytest
from fake_engine import FakeEngine
from langchain_core.caches import InMemoryCache
from langchain_core.documents import Document

from langchain_ragcachekit import ChatRagCache, RagCacheLLM, RagCacheRetriever

TEXT = "it is in the north of the town by the sea ."


def make(engine=None, **settings):
    return ChatRagCache(rag=engine or FakeEngine(), **settings)


@pytest.mark.parametrize(
    "given",
    [
        lambda engine, store: ChatRagCache(cache=engine),
        lambda engine, store: RagCacheLLM(rag=engine, cache=engine),
        lambda engine, store: RagCacheRetriever.wrap(store, cache=engine),
        lambda engine, store: RagCacheRetriever(retriever=store, cache=engine),
        lambda engine, store: RagCacheRetriever.from_documents([Document("a")], None, cache=engine),
    ],
)
def test_the_engine_is_no_cache_of_langchains(given, store):
    """Before anything is embedded: there are no embeddings in the last case."""
    with pytest.raises(ValueError, match="give the engine as rag="):
        given(FakeEngine(), store)


def test_one_model_is_taken():
    model = make()
    with pytest.raises(ValueError, match="greater than 0"):
        model.invoke("hi", max_tokens=0)
    with pytest.raises(ValueError, match="this engine holds 'fake/model'"):
        model.invoke("hi", model="other")
    assert model.invoke("hi", model="fake/model").content == TEXT


async def test_events_of_a_stream_carry_the_pieces_and_the_usage():
    events = [event async for event in make().astream_events("hi", version="v2")]
    pieces = [e["data"]["chunk"].content for e in events if e["event"] == "on_chat_model_stream"]
    assert "".join(pieces) == TEXT
    assert events[-1]["data"]["output"].usage_metadata["output_tokens"] == 12


async def test_one_failing_prompt_ends_the_others():
    engine = FakeEngine(gate=threading.Event())
    model = RagCacheLLM(rag=engine)
    submit = engine.submit

    def failing(prompt, **options):
        if prompt == "bad":
            while len(engine.streams) < 2 or not all(request.callbacks for request in engine.streams):
                time.sleep(0.001)  # until the others run
            raise ValueError("no")
        return submit(prompt, **options)

    engine.submit = failing
    task = asyncio.create_task(model.agenerate(["a", "b", "bad"]))
    with pytest.raises(ValueError, match="no"):
        await task
    assert all(request.cancelled.is_set() for request in engine.streams)
    engine.gate.set()


def test_langchains_cache_of_answers_works_beside_the_engine_and_keeps_tenants_apart():
    """The settings, and the engine's weights, decide which answers are the same."""
    changes = (
        *({}, {"max_tokens": 3}, {"temperature": 0.5}, {"top_p": 0.5}, {"top_k": 5}),
        *({"namespace": "b"}, {"policy": "full"}, {"generate_kwargs": {"seed": 1}}),
        {"stop": ["x"]},
    )
    answers, other = InMemoryCache(), FakeEngine()
    other.fingerprint = "other weights"
    for kind in (ChatRagCache, RagCacheLLM):
        engine = FakeEngine()
        for settings in (*changes, *changes):
            kind(rag=engine, cache=answers, **settings).invoke("hi")
        assert len(engine.calls) == len(changes)
        kind(rag=other, cache=answers).invoke("hi")
    assert len(other.calls) == 2


def test_copies_and_bound_models_keep_the_engine():
    engine = FakeEngine()
    model = make(engine)
    model.model_copy(update={"max_tokens": 5}).invoke("hi")
    model.bind(stop=["z"]).invoke("hi")
    assert [(call["max_new_tokens"], call["stop"]) for call in engine.calls] == [(5, None), (256, ["z"])]


def test_tokens_are_counted_by_the_engine():
    assert make().get_num_tokens("one two three") == 3


async def test_plain_model_runs_prompts_as_one_batch_and_reports_each():
    engine = FakeEngine()
    engine.register(["Ada lives in Bern ."])
    model = RagCacheLLM(rag=engine, max_tokens=5)
    for result in [f(["Ada lives in Bern . Where ?", "hi"]) for f in (model.generate, model.agenerate)]:
        found = await result if asyncio.iscoroutine(result) else result
        infos = [generation[0].generation_info for generation in found.generations]
        assert [(info["cache_read"], info["finish_reason"]) for info in infos] == [(5, "stop"), (0, "stop")]
        assert found.llm_output == {
            "token_usage": {"prompt_tokens": 8, "completion_tokens": 24, "total_tokens": 32},
            "model_name": "fake/model",
        }
    assert [call["max_new_tokens"] for call in engine.calls] == [5] * 4
