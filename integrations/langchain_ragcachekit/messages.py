"""LangChain messages as the dicts that the engine's chat templates take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, ChatMessage, HumanMessage, SystemMessage

ROLES: tuple[tuple[type[BaseMessage], str], ...] = (
    (SystemMessage, "system"),
    (HumanMessage, "user"),
    (AIMessage, "assistant"),
)
NOT_REPEATED = frozenset({"reasoning", "thinking"})
"""Blocks of an earlier answer that are not sent to chat models."""


def to_dicts(messages: Sequence[BaseMessage]) -> list[dict[str, Any]]:
    """Convert messages; marks on content blocks (``chunk: True``) stay.

    ValueError for tool messages and for content blocks that are not text, naming the block's type.
    """
    return [{"role": _role(message), "content": _content(message)} for message in messages]


def _role(message: BaseMessage) -> str:
    if isinstance(message, ChatMessage):
        return message.role
    if isinstance(message, AIMessage) and message.tool_calls:
        raise ValueError("a message with tool calls cannot be used: this chat model does not call tools")
    for kind, role in ROLES:
        if isinstance(message, kind):
            return role
    raise ValueError(
        f"{message.type!r} messages cannot be used: this chat model does not call tools; "
        "put a tool's result into a human message"
    )


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
    marked = block.get("chunk") or (block.get("extras") or {}).get("chunk")
    plain = {"type": "text", "text": block["text"]}
    return {**plain, "chunk": True} if marked else plain
