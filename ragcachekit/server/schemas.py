"""Bodies of requests: what is read, ignored and refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Json,
    Tag,
)
from pydantic_core import PydanticCustomError


def _only(*allowed: object) -> AfterValidator:
    """Refuse all values but these, which change nothing."""

    def check(value: object) -> object:
        if any(value == one for one in allowed):
            return value
        raise PydanticCustomError("unsupported_value", "does not support this value")

    return AfterValidator(check)


Zero = Annotated[Any, _only(None, 0)]
Positive = Annotated[int, Field(ge=1)]
_Item = TypeVar("_Item")
# One error for a list, however many of its items are wrong.
Stops = Annotated[list[_Item], Field(fail_fast=True, max_length=4)]
Some = Annotated[list[_Item], Field(fail_fast=True, max_length=1 << 12)]
Ids = Annotated[list[int], Field(fail_fast=True, max_length=1 << 20)]


def _kind(prompt: object) -> str:
    if not isinstance(prompt, list):
        return "str"
    first = prompt[0] if prompt else ""
    return "list[int]" if isinstance(first, int) else "list[list]" if isinstance(first, list) else "list[str]"


AnyPrompt = Annotated[
    Annotated[str, Tag("str")]
    | Annotated[Some[str], Tag("list[str]")]
    | Annotated[Ids, Tag("list[int]")]
    | Annotated[Some[Ids], Tag("list[list]")],
    Discriminator(_kind),
]


class Part(BaseModel):
    """A content part; ``cache_control`` and ``prompt_cache_breakpoint`` make its text a chunk."""

    type: str
    text: str | None = None
    refusal: str | None = None
    cache_control: dict[str, Any] | None = None
    prompt_cache_breakpoint: bool | dict[str, Any] | None = None


class CalledFunction(BaseModel):
    """Name and arguments of a call, which come as JSON in a string."""

    name: str
    arguments: Annotated[Json[dict[str, Any]], BeforeValidator(lambda text: text or "{}")] = {}


class Called(BaseModel):
    """A tool call of an earlier answer."""

    id: str
    function: CalledFunction


class Message(BaseModel):
    """A message of the conversation; other fields, as answers have them, are not read."""

    role: Literal["developer", "system", "user", "assistant", "tool"]
    content: str | Some[Part] | None = None
    name: str | None = None
    tool_calls: Some[Called] | None = None
    tool_call_id: str | None = None


class Function(BaseModel):
    """A function's JSON schema."""

    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(BaseModel):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function


class Document(BaseModel):
    """A document for the prompt; its title, if any, is the first line of its chunk."""

    model_config = ConfigDict(extra="forbid")
    text: str
    id: str | None = None
    title: str | None = None


class StreamOptions(BaseModel):
    """Options of a streamed answer."""

    include_usage: bool | None = None


class Completion(BaseModel):
    """What both kinds of requests have in common; unknown arguments are refused."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str
    n: Positive | None = None
    stop: str | Stops[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    max_tokens: Positive | None = None
    # Our own
    documents: Some[str | Document] = []
    cached_content: str | None = Field(None, validation_alias=AliasChoices("cached_content", "cachedContent"))
    chunk_ids: Some[str] = []
    cache_salt: str | None = None
    prompt_cache_key: str | None = None
    # Without effect
    user: Any = None
    # Refused, but for the value that changes nothing
    frequency_penalty: Zero = None
    presence_penalty: Zero = None
    logit_bias: Annotated[Any, _only(None, {})] = None


class ChatRequest(Completion):
    """The body of ``/v1/chat/completions``."""

    messages: Annotated[Some[Message], Field(min_length=1)]
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Some[Tool] | None = None
    parallel_tool_calls: bool | None = None
    tool_choice: Annotated[Any, _only(None, "none", "auto")] = None
    # Without effect
    metadata: Any = None
    safety_identifier: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    # Refused, but for the value that changes nothing
    response_format: Annotated[Any, _only(None, {"type": "text"})] = None
    modalities: Annotated[Any, _only(None, ["text"])] = None
    store: Annotated[Any, _only(None, False)] = None
    service_tier: Annotated[Any, _only(None, "auto", "default")] = None


class TextRequest(Completion):
    """The body of ``/v1/completions``; a prompt is a text or token ids."""

    prompt: AnyPrompt
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    echo: Annotated[Any, _only(None, False)] = None
    suffix: Annotated[Any, _only(None, "")] = None
    best_of: Annotated[Any, _only(None, 1)] = None
