"""``order="cached"``: documents that continue a cached beginning come first, in chains as users write."""

import asyncio
import threading

import pytest
from fake_engine import FakeEngine
from integration_kit import FACTS, PROMPT, Calls, asked
from langchain_classic.chains import create_retrieval_chain
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever as LangChainBase
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.retrievers import BaseRetriever as LlamaBase
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_kit import seeing
from pydantic import ConfigDict, Field

from langchain_ragcachekit import ChatRagCache, RagCacheRetriever
from llama_index_ragcachekit import ChunkReuseEvent, RagCacheLLM, RagCacheSynthesizer
from llama_index_ragcachekit import RagCacheRetriever as NodeRetriever
from ragcachekit import RagCache, TreeConfig, bypass_query_cache


def numbers(question):
    """A question begins with the numbers of its documents: ``"2 0 1 Where?"``."""
    return [int(word) for word in question.split() if word.isdigit()]


class Documents(LangChainBase):
    """Finds the documents that the question names, and counts its searches."""

    asked: Calls = Field(default_factory=Calls)
    model_config = ConfigDict(arbitrary_types_allowed=True)

    def cache_key_parts(self):
        return ()

    def _get_relevant_documents(self, query, *, run_manager):
        self.asked.append(query)
        found = enumerate(numbers(query))
        return [Document(FACTS[n], id=f"{at}-{n}", metadata={"page": f"page {n}"}) for at, n in found]


class Nodes(LlamaBase):
    """The same in LlamaIndex; scores fall in the order found."""

    def __init__(self):
        super().__init__()
        self.asked = Calls()

    def cache_key_parts(self):
        return ()

    def _retrieve(self, query_bundle):
        self.asked.append(query_bundle.query_str)
        named = enumerate(numbers(query_bundle.query_str))
        node = {n: TextNode(text=fact, metadata={"page": f"page {n}"}) for n, fact in enumerate(FACTS)}
        return [NodeWithScore(node=node[n], score=1.0 - at / 10) for at, n in named]


class InLangChain:
    inner, twice = Documents, [0, 0]

    def __init__(self, embeddings, embedder):
        self.embeddings = embeddings

    def wrap(self, inner, **settings):
        return RagCacheRetriever.wrap(inner, embeddings=self.embeddings, **settings)

    def own(self, **settings):
        return RagCacheRetriever.from_documents([*map(Document, FACTS)], self.embeddings, **settings)

    def found(self, retriever, question):
        return [FACTS.index(one.page_content) for one in retriever.invoke(question)]

    async def awaited(self, retriever, question):
        return [FACTS.index(one.page_content) for one in await retriever.ainvoke(question)]

    def answer(self, rag, retriever, question, **options):
        """Documents in the order of the prompt, and prompt tokens that were reused."""
        llm = ChatRagCache(rag=rag, max_tokens=2, **options)
        chain = create_retrieval_chain(retriever, create_stuff_documents_chain(llm, PROMPT))
        result, usage = asked(chain, {"input": question})
        order = [FACTS.index(one.page_content) for one in result["context"]]
        return order, usage["input_token_details"]["cache_read"]


class InLlamaIndex:
    inner, twice = Nodes, [0]  # which the framework takes out

    def __init__(self, embeddings, embedder):
        self.embedder = embedder

    def wrap(self, inner, **settings):
        return NodeRetriever(inner, embed_model=self.embedder, **settings)

    def own(self, **settings):
        return NodeRetriever.from_nodes([TextNode(text=text) for text in FACTS], self.embedder, **settings)

    def found(self, retriever, question):
        return [FACTS.index(one.node.text) for one in retriever.retrieve(question)]

    async def awaited(self, retriever, question):
        return [FACTS.index(one.node.text) for one in await retriever.aretrieve(QueryBundle(question))]

    def answer(self, rag, retriever, question, **options):
        llm = RagCacheLLM(rag=rag, max_tokens=2, **options)
        engine = RetrieverQueryEngine.from_args(retriever, llm, RagCacheSynthesizer(llm))
        with seeing(ChunkReuseEvent) as seen:
            response = engine.query(question)
        (event,) = seen.events
        order = [FACTS.index(item.node.text) for item in response.source_nodes]
        return order, event.exact_tokens


@pytest.fixture(params=[InLangChain, InLlamaIndex])
def framework(request, embeddings, embedder):
    return request.param(embeddings, embedder)


@pytest.fixture
def rag(tiny_model, tiny_tokenizer, digests):
    tree = TreeConfig(host_bytes=1 << 26)
    with RagCache(
        tiny_model, tiny_tokenizer, policy="prefix", cold="now", tree=tree, cache_dir=digests
    ) as rag:
        yield rag


def test_a_chain_reuses_the_longest_cached_beginning(framework, rag):
    found = framework.wrap(framework.inner(), rag=rag)
    cached = framework.wrap(framework.inner(), rag=rag, order="cached")
    framework.answer(rag, cached, "0 1 2 Where?")
    order, little = framework.answer(rag, found, "3 1 0 Where?")
    assert order == [3, 1, 0]
    order, much = framework.answer(rag, cached, "4 2 1 0 Where?")
    assert order == [0, 1, 2, 4]
    assert much >= little + sum(rag.count_tokens(FACTS[n]) for n in (0, 1, 2))
    order, _ = framework.answer(rag, cached, "0 1 5 What?")
    assert order == [0, 1, 5], "as found"


def test_the_query_cache_keeps_the_order_found_and_each_call_has_its_own(framework, rag):
    inner = framework.inner()
    retriever = framework.wrap(inner, rag=rag, order="cached")
    question = "2 1 0 Where?"
    assert framework.found(retriever, question) == [2, 1, 0]
    framework.answer(rag, retriever, "1 2 Where?")
    assert framework.found(retriever, question) == [1, 2, 0]
    framework.answer(rag, framework.wrap(framework.inner(), rag=rag), "0 2 1 3 Where?")
    rag.forget(texts=[FACTS[3]])
    assert framework.found(retriever, question) == [0, 2, 1]
    assert inner.asked.count(question) == 1, "all but the first were hits"
    rag.forget(texts=[FACTS[0], FACTS[1]])
    assert framework.found(retriever, question) == [2, 1, 0], "neither begins a cached prompt any more"
    with bypass_query_cache():
        framework.answer(rag, retriever, "2 0 Where?")
        assert framework.found(retriever, "0 2 Where?") == [2, 0]


def test_namespaces_are_never_mixed(framework, rag):
    mine, other = (
        framework.wrap(framework.inner(), rag=rag, order="cached", namespace=name) for name in "ab"
    )
    framework.answer(rag, mine, "0 1 Where?", namespace="a")
    framework.answer(rag, other, "2 3 Where?", namespace="b")
    assert framework.found(mine, "1 0 Where?") == [0, 1]
    assert framework.found(other, "1 0 Where?") == [1, 0]
    assert framework.found(other, "3 2 Where?") == [2, 3]
    assert framework.found(mine, "3 2 Where?") == [3, 2]


def test_one_document_none_and_duplicates(framework, rag):
    retriever = framework.wrap(framework.inner(), rag=rag, order="cached")
    framework.answer(rag, retriever, "0 0 1 Where?")
    assert framework.found(retriever, "1 Where?") == [1]
    assert framework.found(retriever, "Where?") == []
    assert framework.found(retriever, "1 0 0 Where?") == [*framework.twice, 1]
    assert framework.found(retriever, "1 2 0 Where?") == [0, 1, 2]


def test_an_index_of_its_own(framework, rag):
    retriever = framework.own(rag=rag, order="cached", k=3)
    plain = framework.own(rag=rag, k=3)
    nearest = framework.found(plain, FACTS[4])
    last_first = "{2} {1} {0} Where?".format(*nearest)
    framework.answer(rag, framework.wrap(framework.inner(), rag=rag), last_first)
    assert framework.found(plain, FACTS[4]) == nearest
    for _ in range(2):  # a search, then a hit
        assert framework.found(retriever, FACTS[4]) == nearest[::-1]


async def test_async_calls_look_up_in_a_thread(framework, rag, monkeypatch):
    retriever = framework.wrap(framework.inner(), rag=rag, order="cached")
    await asyncio.to_thread(framework.answer, rag, retriever, "0 1 2 Where?")
    threads, real = set(), RagCache.cached_first

    def seen(self, texts, **options):
        threads.add(threading.current_thread())
        return real(self, texts, **options)

    monkeypatch.setattr(RagCache, "cached_first", seen)
    questions = ["2 1 0 Where?", "3 1 0 Where?", "2 1 0 Where?", "4 0 Where?"]
    found = await asyncio.gather(*(framework.awaited(retriever, question) for question in questions))
    assert found == [[0, 1, 2], [0, 1, 3], [0, 1, 2], [0, 4]]
    assert threads
    assert threading.main_thread() not in threads


def test_an_engine_that_fails_costs_the_order_alone(framework, rag, caplog):
    retriever = framework.wrap(framework.inner(), rag=rag, order="cached")
    framework.answer(rag, retriever, "0 1 Where?")
    rag.close()
    assert framework.found(retriever, "1 0 Where?") == [1, 0]
    assert "the retrieved chunks are in the order found" in caplog.text


def test_bad_settings(framework):
    with pytest.raises(ValueError, match="'found' or 'cached'"):
        framework.wrap(framework.inner(), order="best")
    with pytest.raises(ValueError, match="order='cached' needs rag="):
        framework.wrap(framework.inner(), order="cached")
    engine = FakeEngine()  # as old as the others
    assert framework.found(framework.wrap(framework.inner(), rag=engine), "1 0 Where?") == [1, 0]
