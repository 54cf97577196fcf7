"""Answers of the engine as LlamaIndex responses."""

from __future__ import annotations

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse, MessageRole
from llama_index.core.instrumentation import get_dispatcher  # type: ignore[attr-defined]

from llama_index_ragcachekit.events import ChunkReuseEvent
from ragcachekit import Answer

dispatcher = get_dispatcher(__name__)

REPORTED = (
    *("namespace", "policy", "fallback", "notes"),
    *("prompt_tokens", "exact_tokens", "approximate_tokens", "recomputed_tokens", "computed_tokens"),
)


def as_completion(answer: Answer, delta: str | None = None) -> CompletionResponse:
    """An answer with its report and token counts; sends a :class:`ChunkReuseEvent`."""
    report, link, output = answer.report, answer.report.link, answer.report.output_tokens
    hits = sum(use.source != "computed" for use in link.chunks)
    dispatcher.event(
        ChunkReuseEvent(
            chunks=len(link.chunks),
            hits=hits,
            misses=len(link.chunks) - hits,
            ttft_ms=report.ttft_ms,
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
    return CompletionResponse(text=answer.text, delta=delta, raw=report.to_dict(), additional_kwargs=counts)


def as_chat(response: CompletionResponse) -> ChatResponse:
    """The same as a message of the assistant."""
    return ChatResponse(
        message=ChatMessage(role=MessageRole.ASSISTANT, content=response.text),
        delta=response.delta,
        raw=response.raw,
        additional_kwargs=response.additional_kwargs,
    )
