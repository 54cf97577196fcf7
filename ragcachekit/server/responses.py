"""``/v1/responses`` for text: requests as those of chats under other names, and the form of its answers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field, model_validator

from ragcachekit.server.answers import Form
from ragcachekit.server.schemas import ChatRequest, Message, Positive, ResponseFormat, Some, only


def _as_messages(given: Any) -> Any:
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


def _as_response_format(text: Any) -> Any:
    wanted = text.get("format") if isinstance(text, dict) else text
    return {**wanted, "json_schema": wanted} if isinstance(wanted, dict) else wanted


class ResponsesRequest(ChatRequest):
    """The body of ``/v1/responses``."""

    messages: Annotated[Some[Message], BeforeValidator(_as_messages), Field(alias="input", min_length=1)]
    instructions: str | None = None
    max_completion_tokens: Annotated[Positive | None, Field(alias="max_output_tokens")] = None
    response_format: Annotated[
        ResponseFormat | None, BeforeValidator(_as_response_format), Field(alias="text")
    ] = None
    # Refused, but for the value that changes nothing
    n: Annotated[Any, only(None, 1)] = None
    tools: Annotated[Any, only(None, [])] = None
    logprobs: Annotated[Any, only(None, False)] = None

    @model_validator(mode="after")
    def _complete(self) -> ResponsesRequest:
        if self.instructions:
            self.messages.insert(0, Message(role="system", content=self.instructions))
        self.stream_options = {"include_usage": True}
        return self


@dataclass
class ResponseForm(Form):
    """The form of one response and of its events."""

    end: ClassVar[bytes] = b""
    _sent, _text, _reason = 0, "", "stop"

    def body(
        self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None, *, chunk: bool = False
    ) -> dict[str, Any]:
        """A whole response; of a stream, the event of a chat."""
        if chunk:
            return super().body(choices, usage, chunk=True)
        self._text, self._reason = choices[0]["message"]["content"], choices[0]["finish_reason"]
        return self._response(self._status, usage)

    def write(self, event: dict[str, Any]) -> bytes:
        """The event of a chat as those of a response."""
        lines = b""
        for translated in self._translated(event):
            lines += f"event: {translated['type']}\n".encode()
            lines += super().write({**translated, "sequence_number": self._sent})
            self._sent += 1
        return lines

    def _translated(self, event: dict[str, Any]) -> Iterator[dict[str, Any]]:
        place = {"output_index": 0, "content_index": 0, "item_id": f"msg_{self.id}", "logprobs": []}
        if "error" in event:
            yield {**event["error"], "type": "error"}
        elif "usage" in event:  # at the end
            yield {"type": "response.output_text.done", **place, "text": self._text}
            yield {"type": "response.output_item.done", "output_index": 0, "item": self._item(self._status)}
            response = self._response(self._status, event["usage"])
            yield {"type": f"response.{self._status}", "response": response}
        elif not self._sent:
            yield {"type": "response.created", "response": self._response("in_progress")}
            begun = {**self._item("in_progress"), "content": []}
            yield {"type": "response.output_item.added", "output_index": 0, "item": begun}
            yield {"type": "response.content_part.added", **place, "part": self._part()}
        else:
            (choice,) = event["choices"]
            delta, self._reason = choice["delta"].get("content", ""), choice["finish_reason"] or "stop"
            self._text += delta
            if delta:
                yield {"type": "response.output_text.delta", **place, "delta": delta}

    @property
    def _status(self) -> str:
        return "incomplete" if self._reason == "length" else "completed"

    def _part(self) -> dict[str, Any]:
        return {"type": "output_text", "text": self._text, "annotations": []}

    def _item(self, status: str) -> dict[str, Any]:
        named = {"type": "message", "id": f"msg_{self.id}", "role": "assistant", "status": status}
        return {**named, "content": [self._part()]}

    def _response(self, status: str, usage: dict[str, Any] | None = None) -> dict[str, Any]:
        named = {"id": f"resp_{self.id}", "object": "response", "model": self.model}
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        known = {"created_at": self.created, "status": status, "error": None, "incomplete_details": cut}
        output = [] if status == "in_progress" else [self._item(status)]
        neutral = {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True}
        return {**named, **known, **neutral, "output": output, "usage": usage and _usage(usage)}


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    renamed = {name.replace("prompt", "input").replace("completion", "output"): usage[name] for name in usage}
    return {**renamed, "output_tokens_details": {"reasoning_tokens": 0}}
