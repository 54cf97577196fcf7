"""LlamaIndex's RagCacheLLM over a recording engine."""

import asyncio
import threading
from types import SimpleNamespace

import pytest
from fake_engine import FakeEngine
from llama_index.core.base.llms.types import ChatMessage, ImageBlock, MessageRole, TextBlock

from llama_index_ragcachekit import RagCacheLLM

TEXT = "it is in the north of the town by the sea ."


def chat(text="hi", role=MessageRole.USER):
    return ChatMessage(role=role, content=text)


def test_metadata_comes_from_the_model():
    metadata = RagCacheLLM(cache=FakeEngine(), max_tokens=40).metadata
    assert (metadata.context_window, metadata.num_output, metadata.model_name) == (2048, 40, "fake/model")
    assert metadata.is_chat_model
    engine = FakeEngine()
    engine.tokenizer = SimpleNamespace(chat_template=None)
    assert not RagCacheLLM(cache=engine).metadata.is_chat_model
    stated = RagCacheLLM(cache=engine, is_chat_model=True, context_window=99).metadata
    assert (stated.is_chat_model, stated.context_window) == (True, 99)


def test_messages_go_to_the_engine_as_dicts():
    engine = FakeEngine()
    messages = [chat("be brief", MessageRole.SYSTEM), chat(), chat("yes?", MessageRole.ASSISTANT), chat("so")]
    response = RagCacheLLM(cache=engine, max_tokens=9, stop=["x"]).chat(messages, temperature=0.5)
    assert engine.calls == [
        {
            "prompt": [
                {"role": "system", "content": "be brief"},
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": "yes?"},
                {"role": "user", "content": "so"},
            ],
            "namespace": None, "policy": None, "stop": ["x"],
            "max_new_tokens": 9, "do_sample": True, "temperature": 0.5,
        }
    ]  # fmt: skip
    assert response.message.role == MessageRole.ASSISTANT
    assert response.message.content == TEXT


def test_without_a_template_messages_become_text():
    engine = FakeEngine()
    RagCacheLLM(cache=engine, is_chat_model=False).chat([chat("Where is Oslo?")])
    assert isinstance(engine.calls[0]["prompt"], str)
    assert "Where is Oslo?" in engine.calls[0]["prompt"]


def test_responses_carry_the_report_and_token_counts():
    engine = FakeEngine()
    engine.register(["Ada lives in Bern ."])
    response = RagCacheLLM(cache=engine).complete("Ada lives in Bern . Where ?")
    assert response.text == TEXT
    assert response.additional_kwargs == {
        "prompt_tokens": 7,
        "completion_tokens": 12,
        "total_tokens": 19,
        "cache_read_tokens": 5,
        "finish_reason": "stop",
    }
    assert response.raw["link"]["approximate_tokens"] == 5


async def test_every_way_to_ask_gives_the_same_answer():
    llm = RagCacheLLM(cache=FakeEngine())
    completed, chatted = llm.complete("hi"), llm.chat([chat()])
    completions = [
        await llm.acomplete("hi"),
        list(llm.stream_complete("hi"))[-1],
        [piece async for piece in await llm.astream_complete("hi")][-1],
    ]
    chats = [
        await llm.achat([chat()]),
        list(llm.stream_chat([chat()]))[-1],
        [piece async for piece in await llm.astream_chat([chat()])][-1],
    ]
    for response in completions:
        assert (response.text, response.raw) == (completed.text, completed.raw)
    for response in chats:
        assert (response.message.content, response.raw) == (chatted.message.content, chatted.raw)


def test_deltas_add_up_to_the_text():
    pieces = list(RagCacheLLM(cache=FakeEngine()).stream_chat([chat()]))
    assert "".join(piece.delta for piece in pieces) == pieces[-1].message.content == TEXT
    assert [piece.raw is None for piece in pieces] == [True] * 12 + [False]


def test_leaving_a_stream_early_cancels_the_generation():
    engine = FakeEngine()
    stream = RagCacheLLM(cache=engine).stream_chat([chat()])
    assert next(stream).delta == "it"
    stream.close()
    assert engine.streams[0].cancelled.is_set()


async def test_cancelling_the_task_cancels_the_generation():
    engine = FakeEngine(gate=threading.Event())
    task = asyncio.create_task(RagCacheLLM(cache=engine).achat([chat()]))
    while not (engine.streams and engine.streams[0]._taken):
        await asyncio.sleep(0.001)  # until the first word is out and the second waits at the gate
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.streams[0].cancelled.is_set()
    engine.gate.set()


def test_what_the_model_cannot_read_is_refused_by_name():
    llm = RagCacheLLM(cache=FakeEngine())
    with pytest.raises(ValueError, match="'image' blocks"):
        llm.chat([ChatMessage(blocks=[TextBlock(text="see"), ImageBlock(url="http://x")])])
    with pytest.raises(ValueError, match="'tool' messages"):
        llm.chat([chat("3", MessageRole.TOOL)])
    with pytest.raises(ValueError, match="greater than 0"):
        RagCacheLLM(cache=FakeEngine(), max_tokens=0)


def test_the_engine_is_not_part_of_what_is_serialised():
    llm = RagCacheLLM(cache=FakeEngine())
    assert "cache" not in llm.to_dict()
    assert "FakeEngine" not in llm.model_dump_json()


def test_a_typo_is_refused():
    with pytest.raises(ValueError, match=r"unknown arguments max_token; .* generate_kwargs"):
        RagCacheLLM(cache=FakeEngine(), max_token=3)


def test_what_is_no_engine_is_refused():
    with pytest.raises(ValueError, match=r"RagCacheLLM needs cache=RagCache\(\.\.\.\), got 'x'"):
        RagCacheLLM(cache="x")
