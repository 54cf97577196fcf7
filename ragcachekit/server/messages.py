"""Anthropic's Messages: requests as chats, their answers in Anthropic's form, whole or streamed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from ragcachekit import Answer
from ragcachekit.server.answers import Choice, OneAnswerForm
from ragcachekit.server.completions import ServedModel, complete
from ragcachekit.server.contexts import ContextStore
from ragcachekit.server.errors import ApiError, invalid, parsed
from ragcachekit.server.schemas import (
    CacheControl,
    CacheOptions,
    ChatRequest,
    Message,
    Positive,
    Some,
    Stops,
    TextPart,
    only,
)


class Turn(BaseModel):
    """A message of the conversation."""

    model_config = ConfigDict(extra="forbid")
    role: Literal["user", "assistant", "system"]
    content: str | Some[TextPart]


class MessagesRequest(BaseModel):
    """The body of ``/v1/messages``; unknown arguments are refused."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str
    max_tokens: Positive
    messages: Annotated[Some[Turn], Field(min_length=1)]
    system: str | Some[TextPart] | None = None
    cache_control: CacheControl | None = None
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
    tools: Annotated[Any, only(None, [])] = None
    tool_choice: Annotated[Any, only(None, {"type": "auto"}, {"type": "none"})] = None

    def as_chat(self) -> ChatRequest:
        """The request as a chat, which keeps what is marked; ApiError 400 unless a user spoke last.

        A mark at the very end, or of the whole request, keeps all of the conversation: the next one goes on
        after it. That last text is no chunk then.
        """
        last = self.messages[-1]
        if last.role != "user":
            raise invalid("The conversation must end with a user message.", "messages")
        explicit = self.cache_control is None
        if isinstance(last.content, list) and last.content and last.content[-1].cache_control:
            end, explicit = last.content[-1].model_copy(update={"cache_control": None}), False
            last = last.model_copy(update={"content": [*last.content[:-1], end]})
        turns = [*self.messages[:-1], last]
        if self.system:
            turns.insert(0, Turn(role="system", content=self.system))
        messages = [Message.model_construct(role=turn.role, content=turn.content) for turn in turns]
        return ChatRequest.model_construct(
            model=self.model,
            messages=messages,
            max_tokens=self.max_tokens,
            stop=self.stop_sequences,
            stream=self.stream,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            prompt_cache_options=CacheOptions(
                mode="explicit" if explicit else "implicit",
                ttl=None if self.cache_control is None else self.cache_control.ttl,
            ),
        )


@dataclass(frozen=True)
class MessageForm(OneAnswerForm):
    """The form of one message; ``decode`` gives the text of token ids, to find which of ``stop`` ended it."""

    max_tokens: int = 0
    stop: Sequence[str] = ()
    decode: Callable[[Sequence[int]], str] = str
    heartbeat: ClassVar[bytes] = b'event: ping\ndata: {"type":"ping"}\n\n'

    def choice(self, index: int, tools: Sequence[dict[str, Any]], parallel: bool) -> Choice:
        """Its one answer."""
        return MessageChoice(self, index, tools, parallel)

    def error(self, error: ApiError) -> dict[str, Any]:
        """The last event of a stream that failed."""
        return error.anthropic_body()


class MessageChoice(Choice):
    """The answer as a message with one block of text."""

    _form: MessageForm

    def start(self, tokens: int) -> list[dict[str, Any]]:
        """The first events; how much of the ``tokens`` is cached is known at the end."""
        usage = {"input_tokens": tokens, "output_tokens": 0}
        block = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
        return [{"type": "message_start", "message": self._message([], usage)}, block, {"type": "ping"}]

    def push(self, text: str) -> list[dict[str, Any]]:
        """The event of a new piece of text."""
        delta = {"type": "text_delta", "text": text}
        return [{"type": "content_block_delta", "index": 0, "delta": delta}]

    def end(self, answer: Answer) -> list[dict[str, Any]]:
        """The last events: why it ended, and its usage."""
        self._rest(answer)  # streams have given all of it
        delta = {"type": "message_delta", "delta": self._ended(answer), "usage": message_usage(answer)}
        return [{"type": "content_block_stop", "index": 0}, delta, {"type": "message_stop"}]

    def whole(self, answer: Answer) -> dict[str, Any]:
        """The response that is not streamed."""
        text, *_ = self._rest(answer)
        message = self._message([{"type": "text", "text": text}], message_usage(answer))
        return message | self._ended(answer)

    def _message(self, content: list[dict[str, Any]], usage: dict[str, int]) -> dict[str, Any]:
        named = {"id": f"msg_{self._form.id}", "type": "message", "role": "assistant"}
        ended = {"stop_reason": None, "stop_sequence": None}
        return {**named, "model": self._form.model, "content": content, **ended, "usage": usage}

    def _ended(self, answer: Answer) -> dict[str, Any]:
        form, report = self._form, answer.report
        text = form.decode(answer.token_ids)
        found = {at: stop for stop in form.stop if (at := text.find(stop)) >= 0}
        if found:
            return {"stop_reason": "stop_sequence", "stop_sequence": found[min(found)]}
        reason = "end_turn"
        if report.finish_reason == "length":
            cut = report.output_tokens < form.max_tokens
            reason = "model_context_window_exceeded" if cut else "max_tokens"
        return {"stop_reason": reason, "stop_sequence": None}


def message_usage(answer: Answer) -> dict[str, int]:
    """Token counts; those read from the cache and those kept are no input tokens."""
    link = answer.report.link
    return {
        "input_tokens": link.prompt_tokens - link.reused_tokens - link.written_tokens,
        "cache_creation_input_tokens": link.written_tokens,
        "cache_read_input_tokens": link.reused_tokens,
        "output_tokens": answer.report.output_tokens,
    }


def router(model: ServedModel, contexts: ContextStore) -> APIRouter:
    """The route of one model."""
    routes = APIRouter(prefix="/v1")

    @routes.post("/messages")
    async def messages(request: Request) -> Response:
        asked = await parsed(request, MessagesRequest)
        decode = model.rag.components.parser.decode
        form = MessageForm(
            True, asked.model, max_tokens=asked.max_tokens, stop=asked.stop_sequences or (), decode=decode
        )
        return await complete(model, contexts, request, asked.as_chat(), form)

    return routes
