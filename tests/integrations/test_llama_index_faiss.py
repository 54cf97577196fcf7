"""LlamaIndex's own FaissVectorStore under RagCacheRetriever: same nodes, hits, and inserts that are seen."""

import faiss
import pytest
from integration_kit import FACTS
from llama_index.core import StorageContext, VectorStoreIndex
from llama_index.core.schema import TextNode
from llama_index.vector_stores.faiss import FaissVectorStore
from llama_kit import Embedder, seeing

from llama_index_ragcachekit import QueryCacheEvent, RagCacheRetriever

QUESTION = "Where was Ada Lind born?"
WIDTH = 64


@pytest.fixture
def embedder():
    return Embedder(asked=[])


@pytest.fixture
def index(embedder):
    store = FaissVectorStore(faiss_index=faiss.IndexFlatL2(WIDTH))
    nodes = [TextNode(text=text, id_=f"node-{n}", metadata={"row": n}) for n, text in enumerate(FACTS)]
    context = StorageContext.from_defaults(vector_store=store)
    return VectorStoreIndex(nodes, storage_context=context, embed_model=embedder)


def of(found):
    return [(item.node.node_id, item.node.text, item.node.metadata, item.score) for item in found]


def test_the_same_nodes_then_a_hit_then_an_insert_that_is_seen(index, embedder, rag):
    inner = index.as_retriever(similarity_top_k=2)
    retriever = RagCacheRetriever(inner, embed_model=embedder, cache=rag)
    with seeing(QueryCacheEvent) as seen:
        first, second = retriever.retrieve(QUESTION), retriever.retrieve(QUESTION)
        assert of(first) == of(second) == of(inner.retrieve(QUESTION))
        index.insert_nodes([TextNode(text="Ada Lind was born in Chur.", id_="new")])
        assert of(retriever.retrieve(QUESTION)) == of(inner.retrieve(QUESTION))
        assert "new" in [item.node.node_id for item in retriever.retrieve(QUESTION)]
    assert [event.hit for event in seen.events] == [False, True, False, True]


async def test_sync_and_async_decide_alike(index, embedder):
    retriever = RagCacheRetriever(index.as_retriever(similarity_top_k=2), embed_model=embedder)
    with seeing(QueryCacheEvent) as seen:
        assert of(await retriever.aretrieve(QUESTION)) == of(retriever.retrieve(QUESTION))
        assert of(retriever.retrieve(QUESTION)) == of(await retriever.aretrieve(QUESTION))
    assert [event.hit for event in seen.events] == [False, True, True, True]
