"""ChatRagCache over a recording engine: options, usage, streaming, cancellation, LangChain's own cache."""

import asyncio
import threading
import time

import pytest
from fake_engine import FakeEngine
from langchain_core.caches import InMemoryCache
from langchain_core.messages import HumanMessage

from langchain_ragcachekit import ChatRagCache, RagCacheLLM
from ragcachekit import DeadlineExceeded
from tool_kit import scripted

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
    with pytest.raises(ValueError, match="not both"):
        model.invoke("hi", max_tokens=3, max_new_tokens=3)
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
    assert [chunk.chunk_position for chunk in chunks] == [None] * 12 + ["last"]


def test_the_first_piece_is_there_before_the_model_has_the_last_one(rag):
    """On the real engine: the model waits in a later step until the first piece was read."""
    text = "It is in the north of the country, by the sea and far from here."
    force = {"prefix_allowed_tokens_fn": scripted(rag.tokenizer, lambda _: text)}
    model, read, steps = ChatRagCache(cache=rag, max_tokens=80, generate_kwargs=force), threading.Event(), []
    model.invoke("hi")  # checks that come once

    def hold(*_):
        steps.append(1)
        assert len(steps) < 8 or read.wait(60)

    hook = rag.model.register_forward_pre_hook(hold)
    try:
        stream = model.stream("hi")
        first = next(stream)
        read.set()
        rest = list(stream)
    finally:
        hook.remove()
    assert len(steps) > 8
    assert "".join(chunk.content for chunk in (first, *rest)) == text
    assert rest[-1].chunk_position == "last"


async def test_events_of_a_stream_carry_the_pieces_and_the_usage():
    events = [event async for event in make().astream_events("hi", version="v2")]
    pieces = [e["data"]["chunk"].content for e in events if e["event"] == "on_chat_model_stream"]
    assert "".join(pieces) == TEXT
    assert events[-1]["data"]["output"].usage_metadata["output_tokens"] == 12


async def test_the_loop_ticks_while_three_answers_are_waited_for():
    engine, ticks = FakeEngine(gate=threading.Event()), 0
    model = make(engine)
    answers = asyncio.gather(*(model.ainvoke("hi") for _ in range(3)))
    while len(engine.streams) < 3 or not all(request._taken for request in engine.streams):
        ticks += 1
        await asyncio.sleep(0.001)  # all three run at once, and the loop goes on
    engine.gate.set()
    assert [message.content for message in await answers] == [TEXT] * 3
    assert ticks > 0


def test_tracing_parameters():
    model = make(temperature=0.5, max_tokens=7, stop=["x"])
    assert model._get_ls_params() == {
        "ls_provider": "ragcachekit",
        "ls_model_name": "fake/model",
        "ls_model_type": "chat",
        "ls_temperature": 0.5,
        "ls_max_tokens": 7,
        "ls_stop": ["x"],
    }
    assert RagCacheLLM(cache=FakeEngine())._get_ls_params()["ls_model_type"] == "llm"


@pytest.mark.parametrize("name", ["max_tokens", "max_new_tokens"])
def test_both_names_of_the_longest_answer_are_taken_everywhere(name):
    engine = FakeEngine()
    for kind in (ChatRagCache, RagCacheLLM):
        kind(cache=engine, **{name: 5}).invoke("hi")
        kind(cache=engine).bind(**{name: 6}).invoke("hi")
        kind(cache=engine).invoke("hi", **{name: 7})
        "".join(map(str, kind(cache=engine).stream("hi", **{name: 8})))
    assert [call["max_new_tokens"] for call in engine.calls] == [5, 6, 7, 8] * 2


def test_a_stream_takes_a_deadline_and_wait(rag):
    settings = {"deadline": 60, "wait": 1.0}
    for kind in (ChatRagCache, RagCacheLLM):
        model = kind(cache=rag, max_tokens=4, generate_kwargs=settings)
        pieces = [getattr(piece, "content", piece) for piece in model.stream("Where is Bern?")]
        whole = model.invoke("Where is Bern?")
        assert "".join(pieces) == getattr(whole, "content", whole)
    late = ChatRagCache(cache=rag, generate_kwargs={"deadline": 0.0})
    with pytest.raises(DeadlineExceeded):
        list(late.stream("Where is Bern?"))


async def test_one_failing_prompt_ends_the_others():
    engine = FakeEngine(gate=threading.Event())
    model = RagCacheLLM(cache=engine)
    submit = engine.submit

    def failing(prompt, **options):
        if prompt == "bad":
            while len(engine.streams) < 2 or not all(request._callbacks for request in engine.streams):
                time.sleep(0.001)  # until the others run
            raise ValueError("no")
        return submit(prompt, **options)

    engine.submit = failing
    task = asyncio.create_task(model.agenerate(["a", "b", "bad"]))
    with pytest.raises(ValueError, match="no"):
        await task
    assert all(request.cancelled.is_set() for request in engine.streams)
    engine.gate.set()


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
    base = make()._identifying_params
    for change in (
        {"max_tokens": 3},
        {"temperature": 0.5},
        {"top_p": 0.5},
        {"top_k": 5},
        {"stop": ["x"]},
        {"namespace": "b"},
        {"policy": "full"},
        {"generate_kwargs": {"seed": 1}},
    ):
        assert make(**change)._identifying_params != base
    other = FakeEngine()
    other.fingerprint = "other weights"
    assert make(other)._identifying_params != base


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
