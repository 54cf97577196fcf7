"""``llama_index.vector_stores.ragcachekit``, as LlamaIndex's other integrations are named."""

from llama_index_ragcachekit import RagCacheVectorStore

__all__ = ["RagCacheVectorStore"]
