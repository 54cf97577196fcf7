"""Tools of a chat model: their schemas, and the calls of them in answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_core.messages.tool import invalid_tool_call, tool_call
from langchain_core.utils.function_calling import convert_to_openai_tool

from ragcachekit import ToolCallReader


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
