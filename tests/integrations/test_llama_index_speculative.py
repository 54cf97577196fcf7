"""SpeculativeQueryEngine: the answers and sources of the plain query engine, begun during the search."""

import asyncio

import pytest
from integration_kit import FACTS
from llama_index.core import VectorStoreIndex
from llama_index.core.postprocessor import SimilarityPostprocessor
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
from queue_kit import until
from soak_kit import soaked

QUESTIONS = ["Where was Ada Lind born?", "Which company builds boats?", "Where is Rome?"]
NODES = [TextNode(text=text, id_=f"n{n}", metadata={"row": n}) for n, text in enumerate(FACTS)]


@pytest.fixture
def retriever(rag, embedder):
    return RagCacheRetriever.from_nodes(NODES, embedder, k=2, rag=rag)


def outcome(response):
    sources = [(one.node_id, one.score, one.node.get_content()) for one in response.source_nodes]
    return str(response), sources, response.metadata


@pytest.mark.parametrize("is_chat_model", soaked([True, False], True))
@pytest.mark.parametrize("streaming", [False, True])
async def test_answers_sources_and_metadata_are_those_of_the_plain_engine(
    rag, retriever, embedder, streaming, is_chat_model
):
    llm = RagCacheLLM(rag=rag, max_tokens=6, policy="full", is_chat_model=is_chat_model)
    made = retriever, RagCacheSynthesizer(llm, streaming=streaming), [SimilarityPostprocessor()]
    plain, engine = RetrieverQueryEngine(*made), SpeculativeQueryEngine(*made)
    expected = [outcome(plain.query(question)) for question in QUESTIONS]
    with seeing(ChunkReuseEvent) as seen:
        retriever.query_cache.clear()
        assert [outcome(engine.query(question)) for question in QUESTIONS] == expected
        retriever.query_cache.clear()
        responses = await asyncio.gather(*map(engine.aquery, QUESTIONS))
        for response in responses if streaming else ():
            await response.get_response()
        assert list(map(outcome, responses)) == expected
        assert outcome(engine.query(QUESTIONS[0])) == expected[0]
        other = VectorStoreIndex(NODES, embed_model=embedder).as_retriever(similarity_top_k=2)
        wrapped = RagCacheRetriever(other, embed_model=embedder, rag=rag)
        str(SpeculativeQueryEngine(wrapped, *made[1:]).query(QUESTIONS[0]))
    searches = [one.speculation["search"] for one in seen.events]
    assert searches == ["staged"] * 6 + ["cached", "not staged"]
    assert engine.pipeline.stats.right > 0


@pytest.mark.parametrize(
    "way",
    [
        lambda engine: engine.query(QUESTIONS[0]),  # dropped without being read
        lambda engine: next(engine.query(QUESTIONS[0]).response_gen),
        lambda engine: asyncio.run(engine.aquery(QUESTIONS[0])) and None,
    ],
)
def test_no_request_goes_on_without_its_reader(rag, retriever, way):
    options = {"max_tokens": 1000, "generate_kwargs": {"min_new_tokens": 1000}}
    synthesizer = RagCacheSynthesizer(RagCacheLLM(rag=rag, **options), streaming=True)
    way(SpeculativeQueryEngine(retriever, synthesizer))
    stats = rag.queue.stats
    until(lambda: stats().submitted == stats().cancelled)
    assert stats().cancelled > 0


def test_another_synthesizer_is_refused(rag, retriever):
    with pytest.raises(TypeError, match="RagCacheSynthesizer"):
        SpeculativeQueryEngine(retriever, get_response_synthesizer(RagCacheLLM(rag=rag)))
