"""Anthropic's Messages: requests as chats, their answers in Anthropic's form, whole or streamed."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from ragcachekit import Answer
from ragcachekit.generate.tool_calls import ToolCall
from ragcachekit.server.answers import Choice, Event, Form, Prompts
from ragcachekit.server.errors import invalid
from ragcachekit.server.schemas import (
    CacheControl,
    CacheOptions,
    Called,
    ChatRequest,
    Message,
    Positive,
    Some,
    Stops,
    TextPart,
    Tool,
    only,
)

as_blocks = BeforeValidator(
    lambda given: [{"type": "text", "text": given}] if given and isinstance(given, str) else given or []
)


class ToolUse(BaseModel):
    """A tool call of an earlier answer."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl | None = None


class ToolResult(BaseModel):
    """What a tool gave."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[Some[TextPart], as_blocks] = []
    cache_control: CacheControl | None = None


class Turn(BaseModel):
    """A message of the conversation."""

    model_config = ConfigDict(extra="forbid")
    role: Literal["user", "assistant", "system"]
    content: Annotated[
        Some[Annotated[TextPart | ToolUse | ToolResult, Field(discriminator="type")]],
        as_blocks,
    ]

    def as_messages(self) -> list[Message]:
        """The results of tools as messages of their own, then the texts and calls as one."""
        messages, texts, calls = list[Message](), list[TextPart](), list[Called]()
        for block in self.content:
            if isinstance(block, ToolResult):
                messages.append(Message(role="tool", content=block.content, tool_call_id=block.tool_use_id))
            elif isinstance(block, ToolUse):
                function = Called.Function.model_construct(name=block.name, arguments=block.input)
                calls.append(Called(id=block.id, function=function))
            else:
                texts.append(block)
        rest = Message(role=self.role, content=texts, tool_calls=calls or None)
        return [*messages, rest] if texts or calls or not messages else messages


class MessagesTool(Tool.Function):
    """A function that the model may call."""

    parameters: dict[str, Any] | None = Field(alias="input_schema")
    type: Literal["custom"] | None = None
    cache_control: CacheControl | None = None


class ToolChoice(BaseModel):
    """Whether the model may call tools, and several in one answer."""

    model_config = ConfigDict(extra="forbid")
    type: Literal["auto", "none"] = "auto"
    disable_parallel_tool_use: bool = False


class MessagesRequest(BaseModel):
    """The body of ``/v1/messages``; unknown arguments are refused."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str
    max_tokens: Positive
    messages: Annotated[Some[Turn], Field(min_length=1)]
    system: Annotated[Some[TextPart], as_blocks] = []
    cache_control: CacheControl | None = None
    tools: Some[MessagesTool] = []
    tool_choice: ToolChoice = ToolChoice()
    stop_sequences: Stops[str] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    # Without effect
    metadata: Any = None
    service_tier: Any = None
    # Refused, but for the value that changes nothing
    thinking: Annotated[Any, only(None, {"type": "disabled"})] = None

    def as_chat(self) -> ChatRequest:
        """The request as a chat, which keeps what is marked; ApiError 400 unless a user spoke last.

        A mark of the whole request, of its last block, or of one that is no text keeps all of the
        conversation: the next one goes on after it. That last text is no chunk then.
        """
        last = self.messages[-1]
        if last.role != "user":
            raise invalid("The conversation must end with a user message.", "messages")
        end = [block.model_copy(update={"cache_control": None}) for block in last.content[-1:]]
        turns = [*self.messages[:-1], last.model_copy(update={"content": [*last.content[:-1], *end]})]
        if self.system:
            turns.insert(0, Turn.model_construct(role="system", content=self.system))
        others = [block for turn in turns for block in turn.content if not isinstance(block, TextPart)]
        ttl = None if self.cache_control is None else self.cache_control.ttl
        keeps_all = any(one.cache_control for one in (self, *self.tools, *others, *last.content[-1:]))
        return ChatRequest.model_construct(
            **self.model_dump(include={"model", "max_tokens", "stream", "temperature", "top_p", "top_k"}),
            messages=[message for turn in turns for message in turn.as_messages()],
            stop=self.stop_sequences,
            tools=[Tool(type="function", function=tool) for tool in self.tools],
            tool_choice=self.tool_choice.type,
            parallel_tool_calls=not self.tool_choice.disable_parallel_tool_use,
            prompt_cache_options=CacheOptions(mode="implicit" if keeps_all else "explicit", ttl=ttl),
        )


class CountRequest(MessagesRequest):
    """The body of ``/v1/messages/count_tokens``."""

    max_tokens: Positive = 1


class MessageForm(Form):
    """The form of one message; ``decode`` gives the text of token ids, to find which stop string ended it."""

    heartbeat, done = b'event: ping\ndata: {"type":"ping"}\n\n', b""

    def __init__(self, asked: MessagesRequest, decode: Callable[[Sequence[int]], str]) -> None:
        super().__init__(asked.model)
        self._asked, self._decode = asked, decode
        self._index, self._in_text = 0, False  # of the content block that is being sent

    def start(self, choice: Choice, tokens: int) -> list[Event]:
        """The first events; how much of the ``tokens`` is cached is known at the end."""
        usage = {"input_tokens": tokens, "output_tokens": 0}
        return [{"type": "message_start", "message": self._message([], usage)}, {"type": "ping"}]

    def push(self, choice: Choice, text: str, calls: Sequence[ToolCall]) -> list[Event]:
        events = list[Event]()
        if text:
            if not self._in_text:
                events.append(self._block("start", content_block={"type": "text", "text": ""}))
            self._in_text = True
            events.append(self._block("delta", delta={"type": "text_delta", "text": text}))
        for call in calls:
            delta = {"type": "input_json_delta", "partial_json": json.dumps(dict(call.arguments))}
            events += [
                *self._text_end(),
                self._block("start", content_block=_tool_use(call) | {"input": {}}),
                self._block("delta", delta=delta),
                self._block("stop"),
            ]
            self._index += 1
        return events

    def end(self, choice: Choice, answer: Answer, reason: str) -> list[Event]:
        delta = {"delta": self._ended(answer, reason), "usage": message_usage(answer)}
        return [*self._text_end(), {"type": "message_delta", **delta}, {"type": "message_stop"}]

    def whole(self, choices: Sequence[Choice], prompts: Prompts) -> Event:
        text, calls, reason = choices[0].end(answer := prompts[0][0])
        blocks = [{"type": "text", "text": text}] if text else []
        message = self._message([*blocks, *map(_tool_use, calls)], message_usage(answer))
        return message | self._ended(answer, reason)

    def _block(self, what: str, **more: Event) -> Event:
        return {"type": f"content_block_{what}", "index": self._index, **more}

    def _text_end(self) -> list[Event]:
        events = [self._block("stop")] if self._in_text else []
        self._index, self._in_text = self._index + self._in_text, False
        return events

    def _message(self, content: list[Event], usage: dict[str, int]) -> Event:
        named = {"id": f"msg_{self.id}", "type": "message", "role": "assistant"}
        ended = {"stop_reason": None, "stop_sequence": None}
        return {**named, "model": self.model, "content": content, **ended, "usage": usage}

    def _ended(self, answer: Answer, reason: str) -> Event:
        text, stops = self._decode(answer.token_ids), self._asked.stop_sequences or ()
        found = {at: stop for stop in stops if (at := text.find(stop)) >= 0}
        if found and reason == "stop":
            return {"stop_reason": "stop_sequence", "stop_sequence": found[min(found)]}
        cut = answer.report.output_tokens < self._asked.max_tokens
        names = {"tool_calls": "tool_use", "length": "model_context_window_exceeded" if cut else "max_tokens"}
        return {"stop_reason": names.get(reason, "end_turn"), "stop_sequence": None}


def _tool_use(call: ToolCall) -> Event:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": dict(call.arguments)}


def message_usage(answer: Answer) -> dict[str, int]:
    """Token counts; those read from the cache and those kept are no input tokens."""
    link = answer.report.link
    return {
        "input_tokens": link.prompt_tokens - link.reused_tokens - link.written_tokens,
        "cache_creation_input_tokens": link.written_tokens,
        "cache_read_input_tokens": link.reused_tokens,
        "output_tokens": answer.report.output_tokens,
    }
