"""LlamaIndex's RagCacheLLM over a recording engine."""

import asyncio
import threading
from types import SimpleNamespace

import pytest
from fake_engine import FakeEngine
from llama_index.core.agent.workflow import ReActAgent
from llama_index.core.base.llms.types import ChatMessage, ImageBlock, MessageRole, TextBlock
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_kit import seeing
from pydantic import BaseModel

from llama_index_ragcachekit import ChunkReuseEvent, RagCacheLLM

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


async def test_a_completion_of_a_chat_model_is_a_user_s_message_unless_it_is_formatted():
    engine = FakeEngine()
    llm, own = RagCacheLLM(cache=engine), RagCacheLLM(cache=engine, completion_to_prompt="<{}>".format)
    plain = RagCacheLLM(cache=engine, is_chat_model=False)
    llm.complete("hi"), list(llm.stream_complete("hi")), await llm.acomplete("hi")
    llm.complete("hi", formatted=True), own.complete("hi"), plain.complete("hi")
    message = [{"role": "user", "content": "hi"}]
    assert [call["prompt"] for call in engine.calls] == [message] * 3 + ["hi", "<hi>", "hi"]


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


@pytest.mark.parametrize("name", ["max_tokens", "max_new_tokens"])
def test_both_names_of_the_answers_length_are_accepted_everywhere(name):
    engine = FakeEngine()
    llm = RagCacheLLM(cache=engine, **{name: 7})
    assert llm.metadata.num_output == 7
    llm.complete("hi")
    llm.complete("hi", **{name: 3})
    list(llm.stream_chat([chat()], **{name: 4}))
    assert [call["max_new_tokens"] for call in engine.calls] == [7, 3, 4]
    assert all("max_tokens" not in call for call in engine.calls)
    with pytest.raises(ValueError, match="are the same: give one of them"):
        RagCacheLLM(cache=engine, max_tokens=3, max_new_tokens=3)


def test_every_answer_sends_one_event_with_what_it_reused():
    engine = FakeEngine()
    engine.register(["Ada lives in Bern ."])
    llm = RagCacheLLM(cache=engine)
    with seeing(ChunkReuseEvent) as seen:
        llm.complete("Ada lives in Bern . Where ?")
        list(llm.stream_chat([chat("Where ?")]))
    reused = [(event.prompt_tokens, event.approximate_tokens, event.ttft_ms) for event in seen.events]
    assert reused == [(7, 5, 1.0), (2, 0, 1.0)]
    assert [(event.namespace, event.policy) for event in seen.events] == [("default", "lego:16")] * 2
    assert seen.events[0].class_name() == "ChunkReuseEvent"


class Town(BaseModel):
    """A town."""

    name: str
    people: int


ANSWER = ('{"name":', '"Oslo",', '"people":', "700000}")
ASKED = PromptTemplate("Which town is in the north of {country}?")


async def test_structured_output_goes_through_the_prompt():
    engine = FakeEngine(words=ANSWER)
    llm = RagCacheLLM(cache=engine)
    town = Town(name="Oslo", people=700000)
    assert llm.structured_predict(Town, ASKED, country="Norway") == town
    assert await llm.astructured_predict(Town, ASKED, country="Norway") == town
    structured = llm.as_structured_llm(Town)
    assert structured.chat([chat("Which town?")]).raw == town
    assert structured.complete("Which town?").raw == town
    assert all('"people"' in call["prompt"][-1]["content"] for call in engine.calls)  # the schema


def test_what_is_not_of_the_schema_is_an_error_that_shows_the_answer():
    with pytest.raises(ValueError, match="Could not extract json string from output: it is in the north"):
        RagCacheLLM(cache=FakeEngine()).structured_predict(Town, ASKED, country="Norway")


def test_tools_are_refused_with_what_to_use_instead():
    llm = RagCacheLLM(cache=FakeEngine())
    assert not llm.metadata.is_function_calling_model
    with pytest.raises(ValueError, match="let a ReActAgent prompt for them"):
        llm.chat([chat()], tools=[{"type": "function"}])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # LlamaIndex's workflows
async def test_a_react_agent_calls_tools_by_prompting():
    class TwoSteps(FakeEngine):
        def submit(self, prompt, **options):
            self.words = TOLD if "Observation: 42" in str(prompt) else CALLING
            return super().submit(prompt, **options)

    people = FunctionTool.from_defaults(lambda: 42, name="people", description="counts")
    llm = RagCacheLLM(cache=TwoSteps())
    memory = ChatMemoryBuffer.from_defaults(llm=llm)  # the default one leaves a database open
    agent = ReActAgent(tools=[people], llm=llm, streaming=False)
    assert str(await agent.run("How many people are there?", memory=memory)) == "There are 42."


CALLING = ("Thought: I need a tool.\nAction: people\nAction Input: {}",)
TOLD = ("Thought: I can answer.\nAnswer: There are 42.",)
