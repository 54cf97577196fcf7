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
        What was read up to now, and what looks like a call and cannot be read.
    """

    def __init__(self, tools: Iterable[Mapping[str, Any]] = ()) -> None:
        self._names = frozenset(tool["function"]["name"] for tool in tools)
        self._answer, self._at = "", 0
        self.calls: list[ToolCall] = []
        self.invalid: list[ToolCall] = []

    def push(self, piece: str) -> str:
        """The text that is known now to be no part of a call; ``calls`` has those that are complete."""
        self._answer += piece
        return self._read(ended=False)

    def rest(self, answer: str | None = None) -> str:
        """The text that is left at the end of the answer; completes ``calls`` and ``invalid``."""
        self._answer = self._answer if answer is None else answer
        return self._read(ended=True)

    def _read(self, ended: bool) -> str:
        text, answer, end = "", self._answer, len(self._answer)
        if not self._names:
            text, self._at = answer[self._at :], end
            return text
        if not self._at and answer.lstrip()[:1] in ("", "{", "[") and not (ended and OPEN in answer):
            return self._read_plain() if ended else ""
        while (start := answer.find(OPEN, self._at)) >= 0:
            text += answer[self._at : start].rstrip()
            self._at, begin = start, start + len(OPEN)
            ends = [at for tag in (CLOSE, OPEN) if (at := answer.find(tag, begin)) >= 0]
            if not (ends or ended):
                return text
            stop = min(ends, default=end)
            self._read_block(answer[begin:stop])
            self._at = stop + len(CLOSE) * answer.startswith(CLOSE, stop)
        if not ended:
            end -= next((size for size in range(len(OPEN) - 1, 0, -1) if answer.endswith(OPEN[:size])), 0)
        left = answer[self._at : end]
        if self.calls or self.invalid or not ended:
            left = left.rstrip()
        self._at += len(left)
        return text + left

    def _read_block(self, body: str) -> None:
        try:
            self.calls += [_call(value) for value in _values(body)]
        except (ValueError, RecursionError) as error:
            self.invalid.append(ToolCall(text=f"{OPEN}{body}", error=str(error)))

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
