"""LlamaIndex on RagCacheKit: a caching retriever and a model that reuses the chunks' KV."""

from llama_index_ragcachekit.llm import RagCacheLLM
from llama_index_ragcachekit.retriever import RagCacheRetriever

__all__ = ["RagCacheLLM", "RagCacheRetriever"]
