"""LangChain messages, documents and tools as prompts take them, and calls of tools in answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from langchain_core.documents import Document
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.messages.tool import invalid_tool_call, tool_call
from langchain_core.prompts import PromptTemplate
from langchain_core.utils.function_calling import convert_to_openai_tool

from ragcachekit import ToolCallReader

ROLES: tuple[tuple[type[BaseMessage], str], ...] = (
    (SystemMessage, "system"),
    (HumanMessage, "user"),
    (AIMessage, "assistant"),
    (ToolMessage, "tool"),
)
NOT_REPEATED = frozenset({"reasoning", "thinking", "tool_use", "tool_call", "function_call"})
"""Blocks of an earlier answer that are not sent to chat models, or not as content."""
MARKS = ("chunk", "cache_control")
"""Keys of a content block that make its text a chunk: RagCacheKit's own, and Anthropic's."""

DOCUMENT_PROMPT = PromptTemplate.from_template("{page_content}")
"""For ``create_stuff_documents_chain(document_prompt=...)``: the text and nothing else."""


def format_docs(documents: Iterable[Document]) -> str:
    """The documents' texts as they are, a blank line between them.

    >>> format_docs([Document("Ada lives in Bern."), Document("Bob lives in Rome.")])
    'Ada lives in Bern.\\n\\nBob lives in Rome.'
    """
    return "\n\n".join(document.page_content for document in documents)


def to_dicts(
    messages: Sequence[BaseMessage], renders_tools: Callable[[], bool] = lambda: False
) -> list[dict[str, Any]]:
    """Convert messages; content blocks with one of :data:`MARKS` are marked as chunks, by text or by id.

    ``renders_tools``: whether the chat template has tools. Without, messages of tools and with tool
    calls are a ValueError, as are content blocks that are not text; it names the block's type.
    """
    fields = [_tool_fields(message) for message in messages]
    if any(fields) and not renders_tools():
        raise ValueError(
            "messages of tools or with tool calls cannot be used: the model's chat template does not render "
            "tools; put a tool's result into a human message"
        )
    return [
        {"role": _role(message), "content": _content(message), **more}
        for message, more in zip(messages, fields, strict=True)
    ]


def _role(message: BaseMessage) -> str:
    if isinstance(message, ChatMessage):
        return message.role
    for kind, role in ROLES:
        if isinstance(message, kind):
            return role
    raise ValueError(f"{message.type!r} messages cannot be used: no chat template has them")


def _tool_fields(message: BaseMessage) -> dict[str, Any]:
    if isinstance(message, ToolMessage):
        named = {"name": message.name} if message.name else {}
        return {"tool_call_id": message.tool_call_id, **named}
    if not isinstance(message, AIMessage) or not message.tool_calls:
        return {}
    # Arguments as an object: templates write them by ``tojson``.
    calls = [
        {"type": "function", "id": call["id"], "function": {"name": call["name"], "arguments": call["args"]}}
        for call in message.tool_calls
    ]
    return {"tool_calls": calls}


def _content(message: BaseMessage) -> str | list[dict[str, Any]]:
    if isinstance(message.content, str):
        return message.content
    blocks = (_block(block) for block in message.content)
    return [block for block in blocks if block is not None]


def _block(block: str | dict[str, Any]) -> dict[str, Any] | None:
    if isinstance(block, str):
        return {"type": "text", "text": block}
    kind = block.get("type")
    if kind in NOT_REPEATED:
        return None
    if kind != "text":
        raise ValueError(f"content block of type {kind!r} cannot be used: this chat model reads text only")
    # LangChain's standard blocks put unknown keys under "extras".
    extras = block.get("extras") or {}
    marked = any(block.get(mark) or extras.get(mark) for mark in MARKS)
    given = "id" if marked and "text" not in block else "text"
    plain = {"type": "text", given: block[given]}
    return {**plain, "chunk": True} if marked else plain


def as_schemas(tools: Sequence[Any], choice: Any = None) -> list[dict[str, Any]]:
    """JSON schemas of tools; ValueError for a ``tool_choice`` that an unconstrained model cannot follow."""
    if choice not in (None, False, "auto", "none"):
        raise ValueError(
            f"tool_choice={choice!r} cannot be promised: the model is free to answer without a call; leave "
            "it away, and ask for the call in the prompt"
        )
    return [] if choice == "none" else [convert_to_openai_tool(tool) for tool in tools]


def tool_fields(reader: ToolCallReader) -> dict[str, Any]:
    """A message's fields of the calls that were read, and of what looks like one."""
    return {
        "tool_calls": [tool_call(name=c.name, args=dict(c.arguments), id=c.id) for c in reader.calls],
        "invalid_tool_calls": [
            invalid_tool_call(name=None, args=c.text, id=c.id, error=c.error) for c in reader.invalid
        ],
    }
