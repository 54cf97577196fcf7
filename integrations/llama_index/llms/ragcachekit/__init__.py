"""``llama_index.llms.ragcachekit``, as LlamaIndex's other integrations are named."""

from llama_index_ragcachekit import RagCacheLLM

__all__ = ["RagCacheLLM"]
