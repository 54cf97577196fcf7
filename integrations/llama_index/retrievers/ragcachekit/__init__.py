"""``llama_index.retrievers.ragcachekit``, as LlamaIndex's other integrations are named."""

from llama_index_ragcachekit import RagCacheRetriever

__all__ = ["RagCacheRetriever"]
