"""LlamaIndex on RagCacheKit: a caching retriever and a model that reuses the chunks' KV."""

from llama_index_ragcachekit.events import ChunkReuseEvent, QueryCacheEvent
from llama_index_ragcachekit.llm import RagCacheLLM
from llama_index_ragcachekit.retriever import RagCacheRetriever
from llama_index_ragcachekit.synthesis import RagCachePostprocessor, RagCachePromptHelper, RagCacheSynthesizer
from llama_index_ragcachekit.vector_store import RagCacheVectorStore

__all__ = [
    "ChunkReuseEvent",
    "QueryCacheEvent",
    "RagCacheLLM",
    "RagCachePostprocessor",
    "RagCachePromptHelper",
    "RagCacheRetriever",
    "RagCacheSynthesizer",
    "RagCacheVectorStore",
]
