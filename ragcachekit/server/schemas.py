"""Bodies of OpenAI's requests, and the engine's prompts out of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    Json,
    model_validator,
)
from pydantic_core import PydanticCustomError

from ragcachekit import Chunk, Prompt, Text
from ragcachekit.prompt.segments import marked
from ragcachekit.server.errors import invalid

BETWEEN = "\n\n"
"""After each document."""

Block = dict[str, Any]


def only(*allowed: object) -> AfterValidator:
    """Refuse all values but these, which change nothing."""

    def check(value: object) -> object:
        if any(value == one for one in allowed):
            return value
        raise PydanticCustomError("unsupported_value", "does not support this value")

    return AfterValidator(check)


Positive = Annotated[int, Field(ge=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Bias = Annotated[float, Field(ge=-100, le=100)]
_Item = TypeVar("_Item")
# One error for a list, however many of its items are wrong.
Stops = Annotated[list[_Item], Field(fail_fast=True, max_length=4)]
Some = Annotated[list[_Item], Field(fail_fast=True, max_length=1 << 12)]
Ids = Annotated[list[int], Field(fail_fast=True, max_length=1 << 20)]


Lifetime = Annotated[str, Field(pattern="^[1-9][0-9]{0,5}[smh]$")]
"""As ``30m``."""


class CacheControl(BaseModel):
    """Anthropic's mark of a content part."""

    model_config = ConfigDict(extra="forbid")
    type: Literal["ephemeral"]
    ttl: Lifetime | None = None


class Breakpoint(BaseModel):
    """OpenAI's mark of a content part."""

    model_config = ConfigDict(extra="forbid")
    mode: Literal["explicit"] = "explicit"
    ttl: Lifetime | None = None


class CacheOptions(BaseModel):
    """What is kept of a prompt; ``explicit``: only what is before or in a marked part."""

    model_config = ConfigDict(extra="forbid")
    mode: Literal["implicit", "explicit"] = "implicit"
    ttl: Lifetime | None = None

    @property
    def seconds(self) -> float | None:
        """The lifetime in seconds."""
        units = {"s": 1.0, "m": 60.0, "h": 3600.0}
        return None if self.ttl is None else int(self.ttl[:-1]) * units[self.ttl[-1]]


class TextPart(BaseModel):
    """A text, or an earlier refusal; with ``cache_control`` or ``prompt_cache_breakpoint`` it is a chunk."""

    type: Literal["text", "input_text", "output_text", "refusal"]
    text: str = Field(validation_alias=AliasChoices("text", "refusal"))
    cache_control: CacheControl | None = None
    prompt_cache_breakpoint: bool | Breakpoint | None = None

    @property
    def is_chunk(self) -> bool:
        """Whether it is marked."""
        return bool(self.cache_control or self.prompt_cache_breakpoint)


class Called(BaseModel):
    """A tool call of an earlier answer; its arguments come as JSON in a string."""

    class Function(BaseModel):
        name: str
        arguments: Annotated[Json[dict[str, Any]], BeforeValidator(lambda text: text or "{}")] = {}

    type: Literal["function"] = "function"
    id: str
    function: Function


class Message(BaseModel):
    """A message of the conversation; other fields, as answers have them, are not read."""

    role: Literal["developer", "system", "user", "assistant", "tool"]
    content: str | Some[TextPart] | None = None
    name: str | None = None
    tool_calls: Some[Called] | None = None
    tool_call_id: str | None = None


class Tool(BaseModel):
    """A function that the model may call, with its JSON schema."""

    class Function(BaseModel):
        name: Annotated[str, Field(min_length=1)]
        description: str | None = None
        parameters: dict[str, Any] | None = None

    type: Literal["function"]
    function: Function


class ResponseFormat(BaseModel):
    """What the answer has to be; a schema's name, description and ``strict`` are not read."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] = {}

    @property
    def wanted(self) -> dict[str, Any] | None:
        """The schema of the answer, if any; ApiError 400 if it is missing."""
        if self.type != "json_schema":
            return {"type": "object"} if self.type == "json_object" else None
        if not isinstance(schema := self.json_schema.get("schema"), dict):
            raise invalid("A 'json_schema' needs its 'schema', an object.", "response_format")
        return schema


class Document(BaseModel):
    """A document for the prompt; its title, if any, is the first line of its chunk."""

    model_config = ConfigDict(extra="forbid")
    text: str
    id: str | None = None
    title: str | None = None


class Completion(BaseModel):
    """What both kinds of requests have in common; unknown arguments are refused."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str
    n: Positive | None = None
    stop: str | Stops[str] | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    logit_bias: dict[int, Bias] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    max_tokens: Positive | None = None
    # Our own
    documents: Some[str | Document] = []
    cached_content: str | None = Field(None, validation_alias=AliasChoices("cached_content", "cachedContent"))
    chunk_ids: Some[str] = []
    cache_salt: str | None = None
    prompt_cache_key: str | None = None
    policy: Annotated[Any, only(None, "full")] = None  # reuses nothing, for comparisons
    # Without effect
    user: Any = None


class ChatRequest(Completion):
    """The body of ``/v1/chat/completions``."""

    messages: Annotated[Some[Message], Field(min_length=1)]
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Some[Tool] | None = None
    parallel_tool_calls: bool | None = None
    tool_choice: Annotated[Any, only(None, "none", "auto")] = None
    prompt_cache_options: CacheOptions | None = None
    response_format: ResponseFormat | None = None
    # Without effect
    metadata: Any = None
    safety_identifier: Any = None
    prompt_cache_retention: Any = None
    # Refused, but for the value that changes nothing
    modalities: Annotated[Any, only(None, ["text"])] = None
    store: Annotated[Any, only(None, False)] = None
    service_tier: Annotated[Any, only(None, "auto", "default")] = None


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
    top_logprobs: Annotated[Any, only(None, 0)] = None
    parallel_tool_calls: Any = None  # without effect

    @model_validator(mode="after")
    def _complete(self) -> ResponsesRequest:
        if self.instructions:
            self.messages.insert(0, Message(role="system", content=self.instructions))
        return self


class TextRequest(Completion):
    """The body of ``/v1/completions``; a prompt is a text or token ids."""

    prompt: str | Ids | Some[str] | Some[Ids]
    logprobs: Annotated[Any, only(None)] = None
    echo: Annotated[Any, only(None, False)] = None
    suffix: Annotated[Any, only(None, "")] = None
    best_of: Annotated[Any, only(None, 1)] = None


# -- prompts ----------------------------------------------------------------------------------------------


def document_text(document: str | Document) -> str:
    """The text of a document's chunk."""
    if isinstance(document, str):
        return document
    return f"{document.title}\n{document.text}" if document.title else document.text


def chat_prompt(messages: Sequence[Message], documents: Sequence[str]) -> list[dict[str, Any]]:
    """Messages for the engine, with the documents before the last user message's text; ApiError 400."""
    plain = [_message(number, message) for number, message in enumerate(messages)]
    chunks = document_blocks(documents)
    asked = [message for message in plain if message["role"] == "user"]
    if chunks and not asked:
        raise invalid("Documents need a user message.", "documents")
    if chunks:
        asked[-1]["content"] = [*chunks, *_blocks(asked[-1]["content"])]
    return plain


def document_blocks(documents: Iterable[str]) -> list[dict[str, Any]]:
    """Documents as they begin a user message's content."""
    return [block for document in documents for block in (marked(document), _text(BETWEEN))]


def text_prompt(prompt: str | Sequence[int], documents: Sequence[str]) -> str | Prompt:
    """A prompt of a text, or of token ids, after the documents."""
    if isinstance(prompt, str) and not documents:
        return prompt
    chunks = [segment for document in documents for segment in (Chunk(document), Text(BETWEEN))]
    return Prompt([*chunks, Text(prompt) if isinstance(prompt, str) else Text(token_ids=tuple(prompt))])


def size_of(prompt: Any) -> tuple[int, int, int]:
    """Characters, token ids and chunks of a prompt for the engine."""
    if isinstance(prompt, str):
        return len(prompt), 0, 0
    if isinstance(prompt, Prompt):
        parts = [(segment.text or "", isinstance(segment, Chunk)) for segment in prompt.segments]
        ids = sum(len(segment.token_ids or ()) for segment in prompt.segments)
    else:
        blocks = [block for message in prompt for block in _blocks(message["content"])]
        parts, ids = [(block["text"], "chunk" in block) for block in blocks], 0
    return sum(len(text) for text, _ in parts), ids, sum(is_chunk for _, is_chunk in parts)


def _message(number: int, message: Message) -> dict[str, Any]:
    if message.content is None and not message.tool_calls:
        text = f"Invalid value for 'content': expected a string or a list, got null in message {number}."
        raise invalid(text, f"messages[{number}].content")
    content = message.content if not isinstance(message.content, list) else list(map(_block, message.content))
    role = "system" if message.role == "developer" else message.role
    return {**message.model_dump(exclude_none=True), "role": role, "content": content}


def _block(part: TextPart) -> Block:
    return marked(part.text) if part.is_chunk else _text(part.text)


def _blocks(content: Any) -> list[Block]:
    if isinstance(content, list):
        return content
    return [_text(content)] if content else []


def _text(text: str) -> Block:
    return {"type": "text", "text": text}
