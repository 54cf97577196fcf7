"""LangChain messages become role/content dicts; what the model cannot read is refused by name."""

import pytest
from langchain_core.messages import (
    AIMessage,
    ChatMessage,
    HumanMessage,
    RemoveMessage,
    SystemMessage,
    ToolMessage,
)

from langchain_ragcachekit.messages import to_dicts


def test_roles_and_order_are_kept():
    messages = [
        SystemMessage("be brief"),
        HumanMessage("hello", name="example_user"),
        AIMessage("hi"),
        ChatMessage(role="critic", content="no"),
        HumanMessage("again"),
    ]
    assert to_dicts(messages) == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "hi"},
        {"role": "critic", "content": "no"},
        {"role": "user", "content": "again"},
    ]


def test_chunk_marks_survive_in_both_places_where_langchain_puts_them():
    blocks = [
        "Context:",
        {"type": "text", "text": "Ada lives in Bern.", "chunk": True},
        {"type": "text", "text": "Bob lives in Rome.", "extras": {"chunk": True}},
        {"type": "text", "text": "Carl lives in Kiel.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "Dora lives in Oslo.", "extras": {"cache_control": {"type": "ephemeral"}}},
        {"type": "text", "id": "1f", "chunk": True},
        {"type": "text", "text": "Where does Ada live?", "index": 3, "anything": {"else": 1}},
    ]
    assert to_dicts([HumanMessage(blocks)])[0]["content"] == [
        {"type": "text", "text": "Context:"},
        {"type": "text", "text": "Ada lives in Bern.", "chunk": True},
        {"type": "text", "text": "Bob lives in Rome.", "chunk": True},
        {"type": "text", "text": "Carl lives in Kiel.", "chunk": True},
        {"type": "text", "text": "Dora lives in Oslo.", "chunk": True},
        {"type": "text", "id": "1f", "chunk": True},
        {"type": "text", "text": "Where does Ada live?"},
    ]


def test_reasoning_of_an_earlier_answer_is_left_out():
    answer = AIMessage([{"type": "reasoning", "reasoning": "hm"}, {"type": "text", "text": "Bern"}])
    assert to_dicts([answer])[0]["content"] == [{"type": "text", "text": "Bern"}]


CALL = {"name": "add", "args": {"a": 1}, "id": "1", "type": "tool_call"}


@pytest.mark.parametrize("message", [AIMessage("", tool_calls=[CALL]), ToolMessage("3", tool_call_id="1")])
def test_without_tools_in_the_template_their_messages_are_refused(message):
    with pytest.raises(ValueError, match="put a tool's result into a human message"):
        to_dicts([HumanMessage("add"), message])


def test_tool_messages_have_the_fields_that_templates_read():
    used = AIMessage([{"type": "tool_use", "id": "1", "name": "add", "input": {"a": 1}}], tool_calls=[CALL])
    assert to_dicts([used, ToolMessage("3", tool_call_id="1", name="add")], lambda: True) == [
        {
            "role": "assistant",
            "content": [],
            "tool_calls": [
                {"type": "function", "id": "1", "function": {"name": "add", "arguments": {"a": 1}}}
            ],
        },
        {"role": "tool", "content": "3", "tool_call_id": "1", "name": "add"},
    ]


def test_messages_of_unknown_roles_are_refused():
    with pytest.raises(ValueError, match="'remove' messages"):
        to_dicts([RemoveMessage(id="1")])
