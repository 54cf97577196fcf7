"""LangChain on RagCacheKit: a caching retriever and a chat model that reuses the chunks' KV."""

from langchain_ragcachekit.chat import ChatRagCache
from langchain_ragcachekit.llm import RagCacheLLM
from langchain_ragcachekit.retriever import RagCacheRetriever
from langchain_ragcachekit.vector_store import RagCacheVectorStore

__all__ = ["ChatRagCache", "RagCacheLLM", "RagCacheRetriever", "RagCacheVectorStore"]
