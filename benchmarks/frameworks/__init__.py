"""LangChain and LlamaIndex over the cache: batches, response modes, text splitters."""
