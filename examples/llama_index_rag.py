"""A LlamaIndex query engine that reuses its nodes: `python examples/llama_index_rag.py [--model PATH]`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from llama_index.core import VectorStoreIndex
from llama_index.core.embeddings import BaseEmbedding
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.schema import TextNode
from pydantic import PrivateAttr

from llama_index_ragcachekit import RagCacheLLM, RagCacheRetriever
from ragcachekit import RagCache
from ragcachekit.commands.embedding import MiniLM

TEXTS = (
    "The ferry to Norda leaves at eight in the morning, on Sundays at ten. The crossing takes fifty minutes.",
    "Tickets for the ferry to Norda cost four crowns. The harbour office sells them until it departs.",
)
QUESTIONS = ("When does the ferry leave on Sundays?", "What does a ticket for the ferry cost?")


class LocalEmbedding(BaseEmbedding):
    """The small embedding model of this package; any embedding model of LlamaIndex does."""

    _model: MiniLM = PrivateAttr(default_factory=MiniLM)

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._model.embed_query(text)

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._model.embed_query(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._model.embed_query(query)


def main(arguments: Sequence[str] | None = None) -> None:
    """Answer the questions, and say what each one reused."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="sample", help="folder or hub id")
    model, embedding = parser.parse_args(arguments).model, LocalEmbedding()
    index = VectorStoreIndex([TextNode(text=text) for text in TEXTS], embed_model=embedding)
    with RagCache.from_pretrained(model) as rag:
        inner = index.as_retriever(similarity_top_k=2)
        retriever = RagCacheRetriever(inner, embed_model=embedding, rag=rag)  # <- line 1
        llm = RagCacheLLM(rag=rag, max_tokens=24)  # <- line 2
        engine = RetrieverQueryEngine.from_args(retriever, llm=llm)
        for question in QUESTIONS:
            before = sum(tier.hits for tier in rag.stats())
            print(f"{question} {engine.query(question)}")
            print(f"  {sum(tier.hits for tier in rag.stats()) - before} entries of KV reused")


if __name__ == "__main__":
    main()
