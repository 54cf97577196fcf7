"""Calls of tools in generated text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from json import JSONDecoder
from typing import Any
from uuid import uuid4

OPEN, CLOSE = "<tool_call>", "</tool_call>"
"""What Hermes, Qwen and others write around a call."""


def _new_id() -> str:
    return uuid4().hex[:9]  # nine letters and digits: what Mistral's templates take


@dataclass(frozen=True)
class ToolCall:
    """A call of the tool ``name``; ``error`` is why ``text`` between the tags is none."""

    name: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    id: str = field(default_factory=_new_id)
    text: str = ""
    error: str = ""


class ToolCallReader:
    """Tells the text of an answer from its tool calls, piece by piece.

    Calls are JSON objects with ``name`` and ``arguments`` (or ``parameters``) between ``<tool_call>`` and
    ``</tool_call>``, or an answer of nothing but such objects that name the given tools. Without ``tools``,
    which are JSON schemas of functions, all is text.

    Attributes
    ----------
    calls, invalid : list of ToolCall
        What was read, and what looks like a call and cannot be read; complete after :meth:`rest`.
    """

    def __init__(self, tools: Iterable[Mapping[str, Any]] = ()) -> None:
        self._names = frozenset(tool["function"]["name"] for tool in tools)
        self._answer, self._shown = "", 0
        self.calls: list[ToolCall] = []
        self.invalid: list[ToolCall] = []

    def push(self, piece: str) -> str:
        """The text that is known now to be no part of a call."""
        self._answer += piece
        return self._new(self._answer[: self._certain()])

    def rest(self, answer: str | None = None) -> str:
        """The text that is left at the end of the answer; fills ``calls`` and ``invalid``."""
        self._answer = self._answer if answer is None else answer
        return self._new(self._read() if self._names else self._answer)

    def _new(self, text: str) -> str:
        shown, self._shown = self._shown, max(self._shown, len(text))
        return text[shown:]

    def _certain(self) -> int:
        text = self._answer
        if not self._names:
            return len(text)
        if text.lstrip()[:1] in ("", "{", "["):
            return 0
        end = text.find(OPEN)
        if end < 0:
            begun = range(min(len(OPEN) - 1, len(text)), 0, -1)
            end = len(text) - next((size for size in begun if text.endswith(OPEN[:size])), 0)
        return len(text[:end].rstrip())

    def _read(self) -> str:
        text, *blocks = self._answer.split(OPEN)
        if not blocks:
            return self._read_plain()
        text = text.rstrip()
        for block in blocks:
            body, _, after = block.partition(CLOSE)
            try:
                self.calls += [_call(value) for value in _values(body)]
            except (ValueError, RecursionError) as error:
                self.invalid.append(ToolCall(text=f"{OPEN}{body}", error=str(error)))
            text += after.rstrip()
        return text

    def _read_plain(self) -> str:
        if self._answer.lstrip()[:1] in ("{", "["):
            try:
                calls = [_call(value) for value in _values(self._answer)]
            except (ValueError, RecursionError):  # JSON, or something like it, that is no call
                return self._answer
            if calls and all(call.name in self._names for call in calls):
                self.calls = calls
                return ""
        return self._answer


def _values(text: str) -> list[Any]:
    """The JSON values in a text, those of lists one by one; ValueError for anything else in it."""
    values: list[Any] = []
    text = text.strip()
    while text:
        value, end = JSONDecoder().raw_decode(text)
        values += value if isinstance(value, list) else [value]
        text = text[end:].lstrip(" \t\r\n;,")
    if not values:
        raise ValueError("a call without a name")
    return values


def _call(value: Any) -> ToolCall:
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or not name:
        raise ValueError("a call without a name")
    arguments = value.get("arguments", value.get("parameters")) or {}
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(arguments, dict):
        raise ValueError(f"the arguments of {name} are no JSON object")
    return ToolCall(name, arguments)
