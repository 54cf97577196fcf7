"""LlamaIndex messages as the dicts that chat templates take, and the engine's answers as responses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    CompletionResponse,
    ContentBlock,
    MessageRole,
    TextBlock,
    ThinkingBlock,
)
from llama_index.core.instrumentation import get_dispatcher  # type: ignore[attr-defined]
from llama_index.core.instrumentation.events import BaseEvent

from ragcachekit import Answer

dispatcher = get_dispatcher(__name__)

REPORTED = (
    *("namespace", "policy", "fallback", "notes"),
    *("prompt_tokens", "exact_tokens", "approximate_tokens", "recomputed_tokens", "computed_tokens"),
)
ROLES = {
    MessageRole.SYSTEM: "system",
    MessageRole.DEVELOPER: "system",
    MessageRole.USER: "user",
    MessageRole.ASSISTANT: "assistant",
    MessageRole.CHATBOT: "assistant",
    MessageRole.MODEL: "assistant",
}


class ChunkReuseEvent(BaseEvent):
    """What one answer of :class:`RagCacheLLM` reused, in tokens; see :class:`ragcachekit.LinkReport`.

    - ``chunks``: Chunks found in the prompt; ``hits`` of them had KV, ``misses`` were computed.
    - ``fallback``: Why the whole prompt was computed, if it was.
    - ``ttft_ms``: Milliseconds from the call to the first token.
    - ``speculation``: Of :class:`SpeculativeQueryEngine`: the search, its stages, requests before the last.
    """

    namespace: str
    policy: str
    prompt_tokens: int
    exact_tokens: int
    approximate_tokens: int
    recomputed_tokens: int
    computed_tokens: int
    chunks: int
    hits: int
    misses: int
    ttft_ms: float
    fallback: str | None = None
    notes: tuple[str, ...] = ()
    speculation: dict[str, Any] | None = None

    @classmethod
    def class_name(cls) -> str:
        """Name under which instrumentation shows the event."""
        return "ChunkReuseEvent"


def to_dicts(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Convert messages to ``{"role", "content"}``.

    ValueError for tool messages and for blocks that are not text, naming the role or the block's type.
    """
    return [{"role": _role(message), "content": _content(message)} for message in messages]


def _role(message: ChatMessage) -> str:
    if message.role not in ROLES:
        raise ValueError(
            f"{message.role.value!r} messages cannot be used: this model does not call tools; "
            "put a tool's result into a user message"
        )
    return ROLES[message.role]


def _content(message: ChatMessage) -> str | list[dict[str, Any]]:
    texts = [_text(block) for block in message.blocks if not isinstance(block, ThinkingBlock)]
    # One string where possible: most chat templates take nothing else.
    return texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]


def _text(block: ContentBlock) -> str:
    if not isinstance(block, TextBlock):
        raise ValueError(f"{block.block_type!r} blocks cannot be used: this model reads text only")
    return block.text


def as_completion(answer: Answer, raw: dict[str, Any], delta: str | None = None) -> CompletionResponse:
    """An answer with its report and token counts; sends a :class:`ChunkReuseEvent`."""
    report, link, output = answer.report, answer.report.link, answer.report.output_tokens
    hits = sum(use.source != "computed" for use in link.chunks)
    dispatcher.event(
        ChunkReuseEvent(
            chunks=len(link.chunks),
            hits=hits,
            misses=len(link.chunks) - hits,
            ttft_ms=report.ttft_ms,
            speculation=raw.get("speculation"),
            **{name: getattr(link, name) for name in REPORTED},
        )
    )
    counts = {
        "prompt_tokens": link.prompt_tokens,
        "completion_tokens": output,
        "total_tokens": link.prompt_tokens + output,
        "cache_read_tokens": link.reused_tokens,
        "finish_reason": report.finish_reason,
    }
    return CompletionResponse(text=answer.text, delta=delta, raw=raw, additional_kwargs=counts)


def as_chat(response: CompletionResponse) -> ChatResponse:
    """The same as a message of the assistant."""
    return ChatResponse(
        message=ChatMessage(role=MessageRole.ASSISTANT, content=response.text),
        delta=response.delta,
        raw=response.raw,
        additional_kwargs=response.additional_kwargs,
    )
