"""LlamaIndex on RagCacheKit: a caching retriever and a model that reuses the chunks' KV."""

from ragcachekit import missing_extra

try:
    from llama_index_ragcachekit.llm import RagCacheLLM
    from llama_index_ragcachekit.messages import ChunkReuseEvent
    from llama_index_ragcachekit.retriever import QueryCacheEvent, RagCacheRetriever
    from llama_index_ragcachekit.speculative import SpeculativeQueryEngine
    from llama_index_ragcachekit.synthesis import (
        RagCachePostprocessor,
        RagCachePromptHelper,
        RagCacheSynthesizer,
    )
    from llama_index_ragcachekit.vector_store import RagCacheVectorStore
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "llama_index":
        raise
    install = missing_extra("llama-index", "'llama-index-core>=0.14,<0.15'")
    raise ModuleNotFoundError(
        f"llama_index_ragcachekit needs llama-index-core: {install}", name=error.name
    ) from error

__all__ = [
    "ChunkReuseEvent",
    "QueryCacheEvent",
    "RagCacheLLM",
    "RagCachePostprocessor",
    "RagCachePromptHelper",
    "RagCacheRetriever",
    "RagCacheSynthesizer",
    "RagCacheVectorStore",
    "SpeculativeQueryEngine",
]
