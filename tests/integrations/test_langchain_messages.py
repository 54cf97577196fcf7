"""LangChain messages become role/content dicts; what the model cannot read is refused by name."""

import pytest
from langchain_core.messages import AIMessage, ChatMessage, HumanMessage, SystemMessage, ToolMessage

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
        {"type": "text", "text": "Where does Ada live?", "index": 3},
    ]
    assert to_dicts([HumanMessage(blocks)])[0]["content"] == [
        {"type": "text", "text": "Context:"},
        {"type": "text", "text": "Ada lives in Bern.", "chunk": True},
        {"type": "text", "text": "Bob lives in Rome.", "chunk": True},
        {"type": "text", "text": "Where does Ada live?"},
    ]


def test_reasoning_of_an_earlier_answer_is_left_out():
    answer = AIMessage([{"type": "reasoning", "reasoning": "hm"}, {"type": "text", "text": "Bern"}])
    assert to_dicts([answer])[0]["content"] == [{"type": "text", "text": "Bern"}]


@pytest.mark.parametrize("kind", ["image", "image_url", "audio", "file"])
def test_other_content_is_refused_by_the_name_of_its_type(kind):
    with pytest.raises(ValueError, match=f"'{kind}'"):
        to_dicts([HumanMessage([{"type": kind}])])


def test_tools_are_refused():
    call = {"name": "add", "args": {}, "id": "1", "type": "tool_call"}
    with pytest.raises(ValueError, match="tool calls"):
        to_dicts([AIMessage("", tool_calls=[call])])
    with pytest.raises(ValueError, match="'tool' messages"):
        to_dicts([ToolMessage("3", tool_call_id="1")])
