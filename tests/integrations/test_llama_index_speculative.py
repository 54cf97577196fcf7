"""SpeculativeQueryEngine: the answers and sources of the plain query engine, begun during the search."""

import asyncio

import pytest
from integration_kit import FACTS
from llama_index.core import VectorStoreIndex
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.core.schema import TextNode
from llama_kit import seeing

from llama_index_ragcachekit import (
    ChunkReuseEvent,
    RagCacheLLM,
    RagCacheRetriever,
    RagCacheSynthesizer,
    SpeculativeQueryEngine,
)

QUESTIONS = ["Where was Ada Lind born?", "Which company builds boats?", "Where is Rome?"]
NODES = [TextNode(text=text, id_=f"n{n}", metadata={"row": n}) for n, text in enumerate(FACTS)]


@pytest.fixture
def retriever(rag, embedder):
    return RagCacheRetriever.from_nodes(NODES, embedder, k=2, rag=rag)


@pytest.fixture
def llm(rag):
    return RagCacheLLM(rag=rag, max_tokens=6, policy="full")  # exact: caches do not change answers


def outcome(response):
    sources = [(one.node_id, one.score, one.node.get_content()) for one in response.source_nodes]
    return str(response), sources, response.metadata


@pytest.mark.parametrize("is_chat_model", [True, False])
@pytest.mark.parametrize("streaming", [False, True])
async def test_answers_sources_and_metadata_are_those_of_the_plain_engine(
    rag, retriever, streaming, is_chat_model
):
    llm = RagCacheLLM(rag=rag, max_tokens=6, policy="full", is_chat_model=is_chat_model)
    synthesizer = RagCacheSynthesizer(llm, streaming=streaming)
    plain = RetrieverQueryEngine.from_args(retriever, llm, synthesizer)
    engine = SpeculativeQueryEngine.from_args(retriever, llm, synthesizer)
    expected = [outcome(plain.query(question)) for question in QUESTIONS]
    with seeing(ChunkReuseEvent) as seen:
        retriever.query_cache.clear()
        assert [outcome(engine.query(question)) for question in QUESTIONS] == expected
        retriever.query_cache.clear()
        for response, right in zip(
            await asyncio.gather(*map(engine.aquery, QUESTIONS)), expected, strict=True
        ):
            if streaming:
                await response.get_response()
            assert outcome(response) == right
        assert outcome(engine.query(QUESTIONS[0])) == expected[0]
    print(engine.pipeline.stats, [one.speculation for one in seen.events])
    assert [one.speculation["search"] for one in seen.events] == ["staged"] * 6 + ["cached"]
    assert engine.pipeline.stats.right > 0
