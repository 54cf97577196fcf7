"""``llama_index.postprocessor.ragcachekit``, as LlamaIndex's other integrations are named."""

from llama_index_ragcachekit import RagCachePostprocessor

__all__ = ["RagCachePostprocessor"]
