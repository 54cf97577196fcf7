"""LangChain on RagCacheKit: a caching retriever and a chat model that reuses the chunks' KV."""

from ragcachekit import missing_extra

try:
    from langchain_ragcachekit.chat import ChatRagCache
    from langchain_ragcachekit.llm import RagCacheLLM
    from langchain_ragcachekit.messages import DOCUMENT_PROMPT, format_docs
    from langchain_ragcachekit.retriever import RagCacheRetriever
    from langchain_ragcachekit.speculative import SpeculativeRag
    from langchain_ragcachekit.vector_store import RagCacheVectorStore
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "langchain_core":
        raise
    raise ModuleNotFoundError(
        f"langchain_ragcachekit needs langchain-core: {missing_extra('langchain', 'langchain-core')}",
        name=error.name,
    ) from error

__all__ = [
    "DOCUMENT_PROMPT",
    "ChatRagCache",
    "RagCacheLLM",
    "RagCacheRetriever",
    "RagCacheVectorStore",
    "SpeculativeRag",
    "format_docs",
]
