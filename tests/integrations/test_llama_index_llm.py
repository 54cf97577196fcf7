"""What only LlamaIndex asks of its model: metadata, message roles, events, structured output, agents."""

from types import SimpleNamespace

import pytest
from fake_engine import FakeEngine
from llama_index.core import VectorStoreIndex
from llama_index.core.agent.workflow import ReActAgent
from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.embeddings import MockEmbedding
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.prompts import PromptTemplate
from llama_index.core.schema import TextNode
from llama_index.core.tools import FunctionTool
from llama_kit import seeing
from pydantic import BaseModel

from llama_index_ragcachekit import ChunkReuseEvent, RagCacheLLM, RagCachePostprocessor, RagCacheRetriever


def chat(text="hi", role=MessageRole.USER):
    return ChatMessage(role=role, content=text)


def test_metadata_comes_from_the_model():
    metadata = RagCacheLLM(rag=FakeEngine(), max_tokens=40).metadata
    assert (metadata.context_window, metadata.num_output, metadata.model_name) == (2048, 40, "fake/model")
    assert metadata.is_chat_model
    engine = FakeEngine()
    engine.tokenizer = SimpleNamespace(chat_template=None)
    assert not RagCacheLLM(rag=engine).metadata.is_chat_model
    stated = RagCacheLLM(rag=engine, is_chat_model=True, context_window=99).metadata
    assert (stated.is_chat_model, stated.context_window) == (True, 99)


def test_messages_go_to_the_engine_as_dicts():
    engine = FakeEngine()
    messages = [chat("be brief", MessageRole.SYSTEM), chat(), chat("yes?", MessageRole.ASSISTANT), chat("so")]
    response = RagCacheLLM(rag=engine).chat(messages)
    assert engine.calls[0]["prompt"] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes?"},
        {"role": "user", "content": "so"},
    ]
    assert response.message.role == MessageRole.ASSISTANT
    with pytest.raises(ValueError, match="'tool' messages"):
        RagCacheLLM(rag=engine).chat([chat("3", MessageRole.TOOL)])


def test_every_answer_has_its_report_and_sends_one_event():
    engine = FakeEngine()
    engine.register(["Ada lives in Bern ."])
    llm = RagCacheLLM(rag=engine)
    with seeing(ChunkReuseEvent) as seen:
        response = llm.complete("Ada lives in Bern . Where ?")
        *pieces, last = llm.stream_chat([chat("Where ?")])
    assert response.raw["link"]["approximate_tokens"] == 5
    assert response.additional_kwargs["finish_reason"] == "stop"
    assert [piece.raw for piece in pieces] == [None] * 12
    assert last.raw["link"]["prompt_tokens"] == 2
    reused = [(event.prompt_tokens, event.approximate_tokens, event.ttft_ms) for event in seen.events]
    assert reused == [(7, 5, 1.0), (2, 0, 1.0)]
    assert [(event.namespace, event.policy) for event in seen.events] == [("default", "lego:16")] * 2
    assert seen.events[0].class_name() == "ChunkReuseEvent"


@pytest.mark.parametrize(
    "given",
    [
        lambda engine: RagCacheLLM(cache=engine),
        lambda engine: RagCachePostprocessor(rag=engine, cache=engine),
        lambda engine: RagCacheRetriever(
            VectorStoreIndex([], embed_model=MockEmbedding(4)).as_retriever(), cache=engine
        ),
        lambda engine: RagCacheRetriever.from_nodes([TextNode(text="a")], MockEmbedding(4), cache=engine),
    ],
)
def test_the_engine_is_given_as_rag(given):
    with pytest.raises(ValueError, match="give the engine as rag="):
        given(FakeEngine())


def test_the_engine_is_not_part_of_what_is_serialised():
    llm = RagCacheLLM(rag=FakeEngine())
    assert "rag" not in llm.to_dict()
    assert "FakeEngine" not in llm.model_dump_json()


class Town(BaseModel):
    """A town."""

    name: str
    people: int


ANSWER = ('{"name":', '"Oslo",', '"people":', "700000}")
ASKED = PromptTemplate("Which town is in the north of {country}?")


async def test_structured_output_goes_through_the_prompt():
    engine = FakeEngine(words=ANSWER)
    llm = RagCacheLLM(rag=engine)
    town = Town(name="Oslo", people=700000)
    assert llm.structured_predict(Town, ASKED, country="Norway") == town
    assert await llm.astructured_predict(Town, ASKED, country="Norway") == town
    structured = llm.as_structured_llm(Town)
    assert structured.chat([chat("Which town?")]).raw == town
    assert structured.complete("Which town?").raw == town
    assert all('"people"' in call["prompt"][-1]["content"] for call in engine.calls)  # the schema
    with pytest.raises(ValueError, match="Could not extract json string from output: it is in the north"):
        RagCacheLLM(rag=FakeEngine()).structured_predict(Town, ASKED, country="Norway")


def test_tools_are_refused_with_what_to_use_instead():
    llm = RagCacheLLM(rag=FakeEngine())
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
    llm = RagCacheLLM(rag=TwoSteps())
    memory = ChatMemoryBuffer.from_defaults(llm=llm)  # the default one leaves a database open
    agent = ReActAgent(tools=[people], llm=llm, streaming=False)
    assert str(await agent.run("How many people are there?", memory=memory)) == "There are 42."


CALLING = ("Thought: I need a tool.\nAction: people\nAction Input: {}",)
TOLD = ("Thought: I can answer.\nAnswer: There are 42.",)
