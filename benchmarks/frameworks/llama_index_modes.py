"""How much of a prompt LlamaIndex's response modes and chat engines reuse: a table for the docs.

``python -m benchmarks.frameworks.llama_index_modes docs/*.md`` needs the sample model and all-MiniLM-L6-v2.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from llama_index.core import Document, VectorStoreIndex
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.chat_engine import CondensePlusContextChatEngine, ContextChatEngine
from llama_index.core.instrumentation import get_dispatcher  # type: ignore[attr-defined]
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.node_parser import SentenceSplitter, SentenceWindowNodeParser
from llama_index.core.postprocessor import MetadataReplacementPostProcessor
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.response_synthesizers import ResponseMode, get_response_synthesizer

from llama_index_ragcachekit import ChunkReuseEvent, RagCacheLLM, RagCacheRetriever, RagCacheSynthesizer
from ragcachekit import RagCache
from ragcachekit.commands.embedding import MiniLM
from ragcachekit.commands.sample_model import sample_model

QUESTIONS = (
    "How fresh are cached results after an index changes?",
    "What is seen when an index changes, and what must be cleared by hand?",
    "Which changes of an index must be told to the cached results?",
)
MODES = ("compact", "refine", "tree_summarize", "simple_summarize", "accumulate")
WINDOWS = [MetadataReplacementPostProcessor("window")]


class _Embedding(BaseEmbedding):
    def _get_text_embedding(self, text: str) -> list[float]:
        return list(MiniLM().embed_query(text))

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)


class _Answers(BaseEventHandler):
    events: list[ChunkReuseEvent]

    def handle(self, event: Any, **kwargs: Any) -> None:
        if isinstance(event, ChunkReuseEvent):
            self.events.append(event)


class _Table:
    """Asks the questions in a namespace of each row's own and prints what all but the first reused."""

    def __init__(self, rag: RagCache, embedding: BaseEmbedding) -> None:
        self._rag, self._embedding, self._answers = rag, embedding, _Answers(events=[])
        get_dispatcher().add_event_handler(self._answers)

    def row(
        self,
        name: str,
        index: VectorStoreIndex,
        make: Callable[[RagCacheRetriever, RagCacheLLM], Callable[[str], object]],
        window: int = 4096,
        k: int = 4,
    ) -> None:
        inner = index.as_retriever(similarity_top_k=k)
        retriever = RagCacheRetriever(inner, embed_model=self._embedding, cache=self._rag, namespace=name)
        ask = make(
            retriever, RagCacheLLM(cache=self._rag, max_tokens=8, namespace=name, context_window=window)
        )
        ask(QUESTIONS[0])
        self._answers.events.clear()
        for question in QUESTIONS[1:]:
            ask(question)
        events = self._answers.events
        prompts = sum(event.prompt_tokens for event in events)
        reused = sum(event.exact_tokens + event.approximate_tokens for event in events)
        print(f"| {name} | {len(events)} | {prompts:,} | {reused / prompts:.0%} |", flush=True)


def _engine(
    mode: str, **settings: Any
) -> Callable[[RagCacheRetriever, RagCacheLLM], Callable[[str], object]]:
    def make(retriever: RagCacheRetriever, llm: RagCacheLLM) -> Callable[[str], object]:
        ours = mode == "RagCacheSynthesizer"
        made = (
            RagCacheSynthesizer(llm)
            if ours
            else get_response_synthesizer(llm, response_mode=ResponseMode(mode))
        )
        return RetrieverQueryEngine.from_args(retriever, llm, made, **settings).query

    return make


def _chat(kind: Any) -> Callable[[RagCacheRetriever, RagCacheLLM], Callable[[str], object]]:
    def make(retriever: RagCacheRetriever, llm: RagCacheLLM) -> Callable[[str], object]:
        memory = ChatMemoryBuffer.from_defaults(llm=llm)
        chat: Callable[[str], object] = kind.from_defaults(retriever, llm=llm, memory=memory).chat
        return chat

    return make


def main(paths: Sequence[str]) -> None:
    """Print the table for these files."""
    documents = [Document(text=Path(one).read_text(), metadata={"file_name": one}) for one in paths]
    embedding = _Embedding(model_name="all-MiniLM-L6-v2")
    nodes = SentenceSplitter(chunk_size=160, chunk_overlap=20).get_nodes_from_documents(documents)
    sentences = SentenceWindowNodeParser.from_defaults(window_size=3).get_nodes_from_documents(documents)
    index, windows = (VectorStoreIndex(some, embed_model=embedding) for some in (nodes, sentences))
    print("| | prompts | their tokens | reused |\n|---|---|---|---|")
    with RagCache.from_pretrained(sample_model(), policy="lego:16", cold="now") as rag:
        table = _Table(rag, embedding)
        for mode in (*MODES, "RagCacheSynthesizer"):
            table.row(mode, index, _engine(mode))
        for mode in ("compact", "RagCacheSynthesizer"):
            table.row(f"{mode}, 8 nodes, 1,024 tokens", index, _engine(mode), window=1024, k=8)
            settings = {"node_postprocessors": WINDOWS}
            table.row(f"{mode}, sentence windows", windows, _engine(mode, **settings))
        for kind in (ContextChatEngine, CondensePlusContextChatEngine):
            table.row(kind.__name__, index, _chat(kind))


if __name__ == "__main__":
    main(sys.argv[1:])
