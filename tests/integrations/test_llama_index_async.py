"""Calls from asyncio overlap and leave the loop free; the query cache can be bypassed for one call."""

from fake_engine import FakeEngine
from integration_kit import FACTS, Calls, Together
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever as LangChainRetriever
from llama_index.core import VectorStoreIndex
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import NodeWithScore, TextNode
from llama_kit import Embedder

from langchain_ragcachekit import RagCacheRetriever as RagCacheLangChainRetriever
from llama_index_ragcachekit import RagCacheRetriever
from ragcachekit import bypass_query_cache


class Slow(BaseRetriever):
    """Blocks its thread, and has no way to search without."""

    def __init__(self, gate):
        super().__init__()
        self.gate = gate

    def cache_key_parts(self):
        return ()

    def _retrieve(self, query_bundle):
        self.gate.wait()
        return [NodeWithScore(node=TextNode(text=query_bundle.query_str), score=1.0)]


async def test_three_searches_of_a_blocking_retriever_overlap_and_the_loop_ticks():
    gate = Together()
    retriever = RagCacheRetriever(Slow(gate), embed_model=Embedder(asked=[]))
    found = await gate.three_times(lambda n: retriever.aretrieve(FACTS[n]))
    assert [items[0].node.text for items in found] == list(FACTS[:3])


class Listed(LangChainRetriever):
    """LangChain's, counting its calls."""

    asked: list

    def cache_key_parts(self):
        return ()

    def _get_relevant_documents(self, query, *, run_manager):
        self.asked.append(query)
        return [Document(FACTS[0])]


async def test_one_call_can_bypass_the_query_cache(embeddings):
    inner = Listed(asked=Calls())
    langchain = RagCacheLangChainRetriever.wrap(inner, embeddings=embeddings)
    nodes = [TextNode(text=text) for text in FACTS]
    engine, embedder = FakeEngine(), Embedder(asked=[])
    index = VectorStoreIndex(nodes, embed_model=embedder)
    wrapped = RagCacheRetriever(index.as_retriever(), embed_model=embedder, rag=engine)
    own = RagCacheRetriever.from_nodes(nodes, embedder)
    for _ in range(2):
        with bypass_query_cache():
            langchain.invoke("Where?")
            await langchain.ainvoke("Where?")
            for retriever in (wrapped, own):
                assert retriever.retrieve("Where is Oslo?")
                assert await retriever.aretrieve("Where is Oslo?")
    assert len(inner.asked) == 4
    assert [one.query_cache.stats().hits for one in (wrapped, own, langchain)] == [0, 0, 0]
    assert len(engine.registered) == 4  # what was found is reused by the model all the same
    for _ in range(2):
        langchain.invoke("Where?")
        wrapped.retrieve("Where is Oslo?")
        own.retrieve("Where is Oslo?")
    assert len(inner.asked) == 5  # and the bypassed calls had filled nothing
    assert [one.query_cache.stats().hits for one in (wrapped, own, langchain)] == [1, 1, 1]
