"""``llama_index.response_synthesizers.ragcachekit``, as LlamaIndex's other integrations are named."""

from llama_index_ragcachekit import RagCachePromptHelper, RagCacheSynthesizer

__all__ = ["RagCachePromptHelper", "RagCacheSynthesizer"]
