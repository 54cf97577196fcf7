"""An embedding model for LlamaIndex that counts words and remembers what it was asked."""

from integration_kit import WordEmbeddings
from llama_index.core.base.embeddings.base import BaseEmbedding


class Embedder(BaseEmbedding):
    """Word counts; remembers the questions that it embedded."""

    asked: list

    def _get_query_embedding(self, query):
        self.asked.append(query)
        return WordEmbeddings().embed_query(query)

    async def _aget_query_embedding(self, query):
        return self._get_query_embedding(query)

    def _get_text_embedding(self, text):
        return WordEmbeddings().embed_query(text)
