"""ChatRagCache over a recording engine: options, usage, streaming, cancellation, LangChain's own cache."""

import asyncio
import threading

import pytest
from fake_engine import FakeEngine
from langchain_core.caches import InMemoryCache
from langchain_core.messages import HumanMessage

from langchain_ragcachekit import ChatRagCache, RagCacheLLM

TEXT = "it is in the north of the town by the sea ."


def make(engine=None, **settings):
    return ChatRagCache(cache=engine or FakeEngine(), **settings)


@pytest.mark.parametrize("temperature", [None, 0, 0.0])
def test_no_temperature_is_greedy(temperature):
    engine = FakeEngine()
    make(engine, temperature=temperature, top_p=0.9, top_k=5).invoke("hi")
    assert engine.calls == [
        {
            "prompt": [{"role": "user", "content": "hi"}],
            "namespace": None,
            "policy": None,
            "stop": None,
            "max_new_tokens": 256,
            "do_sample": False,
        }
    ]


def test_a_temperature_samples_and_one_call_overrides_the_settings():
    engine = FakeEngine()
    model = make(
        engine, temperature=0.7, top_p=0.9, stop=["x"], namespace="a", generate_kwargs={"min_new_tokens": 2}
    )
    model.invoke("hi")
    model.invoke("hi", stop=["y"], temperature=0, max_tokens=3, namespace="b", policy="full", seed=1)
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
        ({"max_tokenz": 3}, "unknown arguments max_tokenz"),
        ({"max_tokens": 0}, "greater than 0"),
        ({"temperature": -1}, "greater than or equal to 0"),
        ({"top_p": 1.5}, "less than or equal to 1"),
        ({"max_tokens": 1, "max_new_tokens": 1}, "not both"),
        ({"rag": FakeEngine()}, "pass it once"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        make(**settings)


def test_something_that_is_no_engine_is_refused():
    for engine in (None, object()):
        with pytest.raises(ValueError, match="needs cache=RagCache"):
            ChatRagCache(cache=engine)


def test_bad_overrides_and_what_the_model_cannot_do_are_refused():
    model = make()
    with pytest.raises(ValueError, match="greater than 0"):
        model.invoke("hi", max_tokens=0)
    with pytest.raises(ValueError, match="does not call tools"):
        model.invoke("hi", tools=[{"name": "add"}])
    with pytest.raises(ValueError, match="this engine holds 'fake/model'"):
        model.invoke("hi", model="other")
    assert model.invoke("hi", model="fake/model").content == TEXT


def test_usage_says_how_many_tokens_were_reused():
    engine = FakeEngine()
    engine.register(["Ada lives in Bern ."], namespace="a")
    message = make(engine, namespace="a").invoke("Context: Ada lives in Bern . Where ?")
    assert message.usage_metadata == {
        "input_tokens": 8,
        "output_tokens": 12,
        "total_tokens": 20,
        "input_token_details": {"cache_read": 5},
    }
    assert message.response_metadata["finish_reason"] == "stop"
    assert message.response_metadata["model_name"] == "fake/model"
    assert message.response_metadata["ragcachekit"]["link"]["approximate_tokens"] == 5
    assert make(engine, namespace="b").invoke("Ada lives in Bern .").usage_metadata[
        "input_token_details"
    ] == {"cache_read": 0}


def test_a_stream_adds_up_to_the_invoked_message():
    model = make()
    chunks = list(model.stream("hi"))
    whole = sum(chunks[1:], chunks[0])
    invoked = model.invoke("hi")
    assert len(chunks) == 13
    assert whole.content == invoked.content == TEXT
    assert whole.usage_metadata == invoked.usage_metadata
    assert whole.response_metadata == invoked.response_metadata
    assert [chunk.usage_metadata is None for chunk in chunks] == [True] * 12 + [False]


async def test_async_stream_and_invoke_give_the_same_as_sync():
    model = make()
    chunks = [chunk async for chunk in model.astream("hi")]
    whole, invoked = sum(chunks[1:], chunks[0]), await model.ainvoke("hi")
    assert whole.content == invoked.content == TEXT
    assert whole.usage_metadata == invoked.usage_metadata
    assert whole.response_metadata == invoked.response_metadata


def test_leaving_a_stream_early_cancels_the_generation():
    engine = FakeEngine()
    stream = make(engine).stream("hi")
    assert next(stream).content == "it"
    assert not engine.streams[0].cancelled.is_set()
    stream.close()
    assert engine.streams[0].cancelled.is_set()


@pytest.mark.parametrize("call", ["ainvoke", "astream"])
async def test_cancelling_the_task_cancels_the_generation(call):
    engine = FakeEngine(gate=threading.Event())
    model = make(engine)

    async def consume():
        if call == "ainvoke":
            return await model.ainvoke("hi")
        return [chunk async for chunk in model.astream("hi")]

    task = asyncio.create_task(consume())
    while not (engine.streams and engine.streams[0]._taken):
        await asyncio.sleep(0.001)  # until the first word is out and the second waits at the gate
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.streams[0].cancelled.is_set()
    engine.gate.set()


def test_langchains_cache_of_answers_works_beside_the_engine_and_keeps_tenants_apart():
    engine, answers = FakeEngine(), InMemoryCache()
    first = ChatRagCache(rag=engine, cache=answers, namespace="a")
    second = ChatRagCache(rag=engine, cache=answers, namespace="b")
    other_policy = ChatRagCache(rag=engine, cache=answers, namespace="a", policy="full")
    for model in (first, first, second, other_policy):
        assert model.invoke("hi").content == TEXT
    assert [(call["namespace"], call["policy"]) for call in engine.calls] == [
        ("a", None),
        ("b", None),
        ("a", "full"),
    ]


def test_settings_of_the_engine_identify_the_model():
    params = make()._identifying_params
    assert (params["model_name"], params["namespace"], params["policy"]) == (
        "fake/model",
        "default",
        "lego:16",
    )


def test_copies_and_bound_models_keep_the_engine():
    engine = FakeEngine()
    model = make(engine)
    model.model_copy(update={"max_tokens": 5}).invoke("hi")
    model.bind(stop=["z"]).invoke("hi")
    assert [(call["max_new_tokens"], call["stop"]) for call in engine.calls] == [(5, None), (256, ["z"])]


def test_an_image_is_refused_by_the_name_of_its_block():
    with pytest.raises(ValueError, match="'image'"):
        make().invoke([HumanMessage([{"type": "image", "url": "http://x"}])])


def test_tokens_are_counted_by_the_engine():
    assert make().get_num_tokens("one two three") == 3


def test_plain_model_runs_prompts_as_one_batch_and_reports_each():
    engine = FakeEngine()
    engine.register(["Ada lives in Bern ."])
    result = RagCacheLLM(cache=engine, max_tokens=5).generate(["Ada lives in Bern . Where ?", "hi"])
    infos = [generation[0].generation_info for generation in result.generations]
    assert [(info["cache_read"], info["finish_reason"]) for info in infos] == [(5, "stop"), (0, "stop")]
    assert result.llm_output == {
        "token_usage": {"prompt_tokens": 8, "completion_tokens": 24, "total_tokens": 32},
        "model_name": "fake/model",
    }
    assert [call["max_new_tokens"] for call in engine.calls] == [5, 5]


async def test_plain_model_streams_and_awaits():
    model = RagCacheLLM(cache=FakeEngine())
    assert "".join(model.stream("hi")) == model.invoke("hi") == await model.ainvoke("hi") == TEXT
    assert "".join([piece async for piece in model.astream("hi")]) == TEXT
    assert await model.abatch(["a", "b"]) == [TEXT, TEXT]


def test_plain_model_keeps_tenants_apart_in_langchains_cache():
    engine, answers = FakeEngine(), InMemoryCache()
    for namespace in ("a", "a", "b"):
        RagCacheLLM(rag=engine, cache=answers, namespace=namespace).invoke("hi")
    assert [call["namespace"] for call in engine.calls] == ["a", "b"]
