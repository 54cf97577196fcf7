"""``/v1/responses`` for text: requests as those of chats under other names, and the form of its answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import BeforeValidator, Field, model_validator
from starlette.responses import Response

from ragcachekit import Answer
from ragcachekit.server.answers import Choice, OneAnswerForm, usage_of
from ragcachekit.server.completions import ServedModel, complete
from ragcachekit.server.contexts import ContextStore
from ragcachekit.server.errors import ApiError, parsed
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
        return self


@dataclass(frozen=True)
class ResponseForm(OneAnswerForm):
    """The form of one response, whose events are numbered."""

    numbers: Iterator[int] = field(default_factory=count)

    def choice(self, index: int, tools: Sequence[dict[str, Any]], parallel: bool) -> Choice:
        """Its one answer."""
        return ResponseChoice(self, index, tools, parallel)

    def line(self, event: dict[str, Any]) -> bytes:
        return super().line({**event, "sequence_number": next(self.numbers)})

    def error(self, error: ApiError) -> dict[str, Any]:
        """The last event of a stream that failed."""
        return {**error.body()["error"], "type": "error"}


class ResponseChoice(Choice):
    """The answer as a response with one message of text."""

    def start(self, tokens: int) -> list[dict[str, Any]]:
        """The first events."""
        return [
            {"type": "response.created", "response": self._response("in_progress", [])},
            {"type": "response.output_item.added", "output_index": 0, "item": self._item("in_progress", [])},
            {"type": "response.content_part.added", **self._place, "part": _part("")},
        ]

    def push(self, text: str) -> list[dict[str, Any]]:
        """The event of a new piece of text."""
        return [{"type": "response.output_text.delta", **self._place, "delta": text}]

    def end(self, answer: Answer) -> list[dict[str, Any]]:
        """The last events: the whole text and the whole response."""
        response = self.whole(answer)  # streams have given all of the text
        return [
            {"type": "response.output_text.done", **self._place, "text": answer.text},
            {"type": "response.output_item.done", "output_index": 0, "item": response["output"][0]},
            {"type": f"response.{response['status']}", "response": response},
        ]

    def whole(self, answer: Answer) -> dict[str, Any]:
        """The response that is not streamed."""
        self._rest(answer)
        usage = usage_of([[answer]])
        named = {
            name.replace("prompt", "input").replace("completion", "output"): usage[name] for name in usage
        }
        ended: dict[str, Any] = {"usage": {**named, "output_tokens_details": {"reasoning_tokens": 0}}}
        status = "completed"
        if answer.report.finish_reason == "length":
            status, ended["incomplete_details"] = "incomplete", {"reason": "max_output_tokens"}
        return self._response(status, [self._item(status, [_part(answer.text)])]) | ended

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": f"msg_{self._form.id}", "output_index": 0, "content_index": 0, "logprobs": []}

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        named = {"type": "message", "id": f"msg_{self._form.id}", "role": "assistant"}
        return {**named, "status": status, "content": content}

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        named = {"id": f"resp_{self._form.id}", "object": "response", "model": self._form.model}
        known = {"created_at": self._form.created, "status": status, "error": None, "output": output}
        return {**named, **known, "tools": [], "tool_choice": "auto", "parallel_tool_calls": True}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": []}


def router(model: ServedModel, contexts: ContextStore) -> APIRouter:
    """The route of one model."""
    routes = APIRouter(prefix="/v1")

    @routes.post("/responses")
    async def responses(request: Request) -> Response:
        body = await parsed(request, ResponsesRequest)
        return await complete(model, contexts, request, body, ResponseForm(True, body.model))

    return routes
