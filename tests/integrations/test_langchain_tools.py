"""Tools and structured output: what the template shows, what is read out of answers, what is refused."""

import json
from typing import TypedDict

import pytest
from fake_engine import FakeEngine
from integration_kit import FACTS
from langchain_classic.agents import AgentExecutor, create_tool_calling_agent
from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import create_retriever_tool, tool
from langchain_tests.unit_tests import ChatModelUnitTests
from llama_index.core.prompts import PromptTemplate
from pydantic import BaseModel

from langchain_ragcachekit import ChatRagCache, RagCacheLLM, RagCacheRetriever
from llama_index_ragcachekit import RagCacheLLM as LlamaIndexLLM
from ragcachekit import RagCache
from server_kit import Town
from small_chat_model import SmallChatModel
from tool_kit import scripted, with_tools


@tool
def born(name: str, year: bool = False) -> str:
    """Where somebody was born."""
    return f"{name} was born in Bern."


class Birth(BaseModel):
    """A birth."""

    name: str
    town: str


class BirthDict(TypedDict):
    """A birth."""

    name: str
    town: str


def saying(answer, renders_tools=True):
    """A chat model whose answer comes in the pieces that spaces leave."""
    engine = FakeEngine(words=answer.split(" "))
    engine.renders_tools = renders_tools
    return ChatRagCache(rag=engine), engine


def call(arguments, name="born"):
    return json.dumps({"name": name, "arguments": arguments})


CALLS = {
    "hermes": (f"I look. \n<tool_call>\n{call({'name': 'Ada'})}\n</tool_call>", "I look.", [{"name": "Ada"}]),
    "two": (
        f"<tool_call>{call({'name': 'Ada'})}</tool_call>\n<tool_call>{call({})}</tool_call> done",
        " done",
        [{"name": "Ada"}, {}],
    ),
    "cut before the end tag": (f"<tool_call> {call({'name': 'Ada'})}", "", [{"name": "Ada"}]),
    "plain": (call({"name": "Ada"}), "", [{"name": "Ada"}]),
    "plain list": (f"[{call({'name': 'Ada'})}]", "", [{"name": "Ada"}]),
    "arguments in a string": (call('{"name": "Ada"}'), "", [{"name": "Ada"}]),
    "other JSON": ('{"name": "unknown", "arguments": {}}', '{"name": "unknown", "arguments": {}}', []),
    "text": ("a <tool is no call , x < y", "a <tool is no call , x < y", []),
}


@pytest.mark.parametrize(("answer", "content", "arguments"), CALLS.values(), ids=CALLS)
def test_calls_are_read_alike_at_once_and_from_a_stream(answer, content, arguments):
    model, _ = saying(answer)
    bound = model.bind_tools([born])
    message, chunks = bound.invoke("Where?"), list(bound.stream("Where?"))
    streamed = sum(chunks[1:], chunks[0])
    for given in (message, streamed):
        assert given.content == content
        assert [(one["name"], one["args"]) for one in given.tool_calls] == [("born", a) for a in arguments]
        assert given.invalid_tool_calls == []
        reason = "tool_call" if arguments else "stop"
        assert given.response_metadata["normalized_finish_reason"] == reason
        assert all(one["id"].isalnum() and len(one["id"]) == 9 for one in given.tool_calls)
    assert [json.loads(one["args"]) for one in chunks[-1].tool_call_chunks] == arguments
    assert not any("tool_call>" in chunk.content for chunk in chunks)
    assert model.invoke("Where?").content == answer, "without tools all is text"


def test_the_profile_says_what_the_model_can_do():
    for renders_tools in (True, False):
        want = {"max_input_tokens": 2048, "tool_calling": renders_tools, "tool_choice": False}
        assert saying("x", renders_tools)[0].profile == want


def test_tools_reach_the_engine_as_schemas():
    model, engine = saying("no call")
    model.bind_tools([born, Birth], tool_choice="auto").invoke("hi", temperature=0)
    model.invoke("hi", tools=[born])
    model.bind_tools([born], tool_choice="none").invoke("hi")
    first, second, third = engine.calls
    assert [one["function"]["name"] for one in first["tools"]] == ["born", "Birth"]
    assert first["tools"][0]["function"]["parameters"]["required"] == ["name"]
    assert [one["function"]["name"] for one in second["tools"]] == ["born"]
    assert "tools" not in third


def test_what_cannot_be_done_is_refused_with_what_to_do():
    plain, _ = saying("x", renders_tools=False)
    for bind in (
        lambda: plain.bind_tools([born]),
        lambda: plain.with_structured_output(Birth, method="function_calling"),
        lambda: plain.invoke("hi", tools=[born]),
    ):
        with pytest.raises(NotImplementedError, match=r"'fake/model' does not render tools.*Take a model"):
            bind()
    model, _ = saying("x")
    for choice in ("any", "required", "born", True):
        with pytest.raises(ValueError, match=r"tool_choice=.* cannot be promised"):
            model.bind_tools([born], tool_choice=choice)
    with pytest.raises(ValueError, match="method must be json_schema"):
        model.with_structured_output(Birth, method="grammar")
    with pytest.raises(ValueError, match="unknown arguments tol"):
        model.with_structured_output(Birth, tol=1)
    with pytest.raises(ValueError, match="ChatRagCache does"):
        RagCacheLLM(rag=FakeEngine()).invoke("hi", tools=[born])


ANSWER = '{"name": "Ada", "town": "Bern"}'


@pytest.mark.parametrize(
    "schema", [Birth, BirthDict, Birth.model_json_schema()], ids=["model", "typed", "dict"]
)
@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_structured_output(schema, method):
    answer = f"<tool_call>{call(json.loads(ANSWER), name='Birth')}</tool_call>"
    if schema is BirthDict:
        answer = answer.replace("Birth", "BirthDict")
    model, engine = saying(answer if method == "function_calling" else f"```json\n{ANSWER}\n```")
    found = model.with_structured_output(schema, method=method).invoke("Who was born where?")
    assert found == (Birth(name="Ada", town="Bern") if schema is Birth else {"name": "Ada", "town": "Bern"})
    (prompt,) = engine.calls[0]["prompt"]
    assert prompt["content"].startswith("Who was born where?")
    assert ('"properties"' in prompt["content"]) == (method == "json_schema")


def test_the_schema_stands_behind_everything_that_may_be_cached():
    model, engine = saying(ANSWER)
    structured = model.with_structured_output(Birth)
    structured.invoke([SystemMessage("Context"), HumanMessage(["a", {"type": "text", "text": "b"}])])
    structured.invoke([HumanMessage("q"), AIMessage("draft")])
    (system, human), (_, _, asked) = (call["prompt"] for call in engine.calls)
    assert system == {"role": "system", "content": "Context"}
    assert [block["text"] for block in human["content"][:2]] == ["a", "b"]
    assert '"town"' in human["content"][2]["text"]
    assert '"town"' in asked["content"]


def test_an_answer_that_does_not_fit_is_an_error_or_the_raw_message():
    model, _ = saying("Ada was born in Bern.")
    with pytest.raises(OutputParserException):
        model.with_structured_output(Birth).invoke("q")
    found = model.with_structured_output(Birth, include_raw=True).invoke("q")
    assert found["raw"].content == "Ada was born in Bern."
    assert found["parsed"] is None
    assert isinstance(found["parsing_error"], OutputParserException)
    good = saying(ANSWER)[0].with_structured_output(Birth, include_raw=True).invoke("q")
    assert (good["parsed"], good["parsing_error"]) == (Birth(name="Ada", town="Bern"), None)


@pytest.fixture
def tooled(tiny_model, tiny_tokenizer, digests):
    own = {"policy": "lego:4", "encoder": "standalone", "cold": "now", "cache_dir": digests}
    engine = RagCache(tiny_model, with_tools(tiny_tokenizer), **own)
    yield engine
    engine.close()


def test_the_prompt_with_tools_is_that_of_transformers(tooled):
    """The tokens of the whole exchange, tool messages included, equal apply_chat_template's."""
    model = ChatRagCache(rag=tooled, max_tokens=1)
    exchange = [
        HumanMessage("Where was Ada born?"),
        AIMessage("", tool_calls=[{"name": "born", "args": {"name": "Ada"}, "id": "abc"}]),
        ToolMessage("Bern", tool_call_id="abc", name="born"),
    ]
    bound = model.bind_tools([born])
    asked = {"type": "function", "id": "abc", "function": {"name": "born", "arguments": {"name": "Ada"}}}
    dicts = [
        {"role": "user", "content": "Where was Ada born?"},
        {"role": "assistant", "content": "", "tool_calls": [asked]},
        {"role": "tool", "content": "Bern", "tool_call_id": "abc", "name": "born"},
    ]
    schemas = bound.kwargs["tools"]
    expected = tooled.tokenizer.apply_chat_template(dicts, tools=schemas, add_generation_prompt=True)
    linked = tooled.link(dicts, tools=schemas)
    assert linked.inputs["input_ids"][0].tolist() == expected["input_ids"]
    assert bound.invoke(exchange).usage_metadata["input_tokens"] == len(expected["input_ids"])


def test_an_agent_with_a_retriever_tool_reuses_the_documents(tooled, store):
    retriever = RagCacheRetriever.wrap(store, rag=tooled, k=2)
    search = create_retriever_tool(retriever, "search", "Searches facts about people.")
    seen = []

    def say(prompt):
        if "<|im_start|>tool" in prompt:
            return "In Bern."
        seen.append(prompt)
        return f"<tool_call>{call({'query': FACTS[0]}, name='search')}</tool_call>"

    force = {"prefix_allowed_tokens_fn": scripted(tooled.tokenizer, say)}
    model = ChatRagCache(rag=tooled, max_tokens=80, generate_kwargs=force)
    prompt = ChatPromptTemplate.from_messages([("human", "{input}"), ("placeholder", "{agent_scratchpad}")])
    agent = AgentExecutor(agent=create_tool_calling_agent(model, [search], prompt), tools=[search])
    assert agent.invoke({"input": "Where was Ada born?"})["output"] == "In Bern."
    assert '"name": "search"' in seen[0], "the template showed the tool"
    hits = sum(one.hits for one in tooled.stats())
    assert agent.invoke({"input": "And where was she born?"})["output"] == "In Bern."
    assert sum(one.hits for one in tooled.stats()) >= hits + 2, "both documents, from the tool's message"


@pytest.mark.parametrize("method", ["json_schema", "json_mode"])
def test_strict_structured_output_cannot_fail(tooled, method):
    """The model is random: what it says by itself is not JSON."""
    model = ChatRagCache(rag=tooled, max_tokens=60)
    with pytest.raises(OutputParserException):
        model.with_structured_output(Town).invoke("Where?")
    strict = model.with_structured_output(Town, method=method, strict=True, include_raw=True)
    found = strict.invoke("Where?")
    assert found["raw"].content.lstrip()[0] == "{"
    assert isinstance(found["parsed"], Town) == (method == "json_schema")


def test_llama_index_takes_the_schema_as_an_option(tooled):
    llm = LlamaIndexLLM(rag=tooled, max_tokens=60)
    options = {"json_schema": Town.model_json_schema()}
    town = llm.structured_predict(Town, PromptTemplate("Where is {name}?"), llm_kwargs=options, name="Ada")
    assert town.name in ("Bern", "Rome")


class TestStandard(SmallChatModel, ChatModelUnitTests):
    """LangChain's own tests, those of structured output among them.

    That of binding tools asks for ``tool_choice="any"``, which is refused.
    """

    @pytest.fixture(autouse=True)
    def _engine(self, tooled):
        self.rag = tooled

    @property
    def has_structured_output(self):
        return True
