"""Events for LlamaIndex's instrumentation: what the query cache answered, what the model reused."""

from __future__ import annotations

from llama_index.core.instrumentation.events import BaseEvent


class QueryCacheEvent(BaseEvent):
    """The result of one question's lookup.

    - ``distance``: Of the nearest question in the retriever's metric; None where none is cached.
    - ``lookup_us``: Microseconds of the lookup.
    - ``note``: Why nothing could be looked up.
    - ``refused``: Why a near enough question was searched all the same.
    """

    hit: bool
    distance: float | None
    lookup_us: float
    note: str | None = None
    refused: str | None = None

    @classmethod
    def class_name(cls) -> str:
        """Name under which instrumentation shows the event."""
        return "QueryCacheEvent"


class ChunkReuseEvent(BaseEvent):
    """What one answer of :class:`RagCacheLLM` reused, in tokens; see :class:`ragcachekit.LinkReport`.

    - ``chunks``: Chunks found in the prompt; ``hits`` of them had KV, ``misses`` were computed.
    - ``fallback``: Why the whole prompt was computed, if it was.
    - ``ttft_ms``: Milliseconds from the call to the first token.
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

    @classmethod
    def class_name(cls) -> str:
        """Name under which instrumentation shows the event."""
        return "ChunkReuseEvent"
