"""The embedded vector store under a LlamaIndex index: what LlamaIndex does with it, and what it keeps."""

import pytest
from integration_kit import FACTS
from llama_index.core import Document, StorageContext, VectorStoreIndex
from llama_index.core.schema import IndexNode, TextNode
from llama_index.core.vector_stores import FilterOperator, MetadataFilter, MetadataFilters, VectorStoreQuery
from llama_index.core.vector_stores.types import VectorStoreQueryMode

from llama_index_ragcachekit import RagCacheVectorStore

QUESTION = "Where was Ada Lind born?"


def over(store, embedder, documents=()):
    context = StorageContext.from_defaults(vector_store=store)
    return VectorStoreIndex.from_documents(list(documents), storage_context=context, embed_model=embedder)


def documents():
    return [Document(text=text, id_=f"fact-{n}", metadata={"row": n}) for n, text in enumerate(FACTS)]


def texts(index, question=QUESTION, **settings):
    return [found.node.get_content() for found in index.as_retriever(**settings).retrieve(question)]


@pytest.mark.parametrize("kind", ["faiss-flat", "faiss-hnsw"])
def test_it_finds_what_the_default_store_finds(kind, embedder):
    plain = VectorStoreIndex.from_documents(documents(), embed_model=embedder)
    ours = over(RagCacheVectorStore(index=kind), embedder, documents())
    for question in (QUESTION, "Which town is in the south?", "Who builds boats?"):
        expected = plain.as_retriever(similarity_top_k=3).retrieve(question)
        found = ours.as_retriever(similarity_top_k=3).retrieve(question)
        assert [one.node.metadata for one in found] == [one.node.metadata for one in expected]
        assert [one.score for one in found] == pytest.approx([one.score for one in expected], abs=1e-6)


def test_a_restart_finds_the_same_nodes(tmp_path, embedder):
    store = RagCacheVectorStore(path=tmp_path)
    before = over(store, embedder, documents()).as_retriever(similarity_top_k=3).retrieve(QUESTION)
    store.close()
    index = VectorStoreIndex.from_vector_store(RagCacheVectorStore(path=tmp_path), embed_model=embedder)
    after = index.as_retriever(similarity_top_k=3).retrieve(QUESTION)
    assert [(one.node.node_id, one.score) for one in after] == [
        (one.node.node_id, one.score) for one in before
    ]
    assert after[0].node.relationships == before[0].node.relationships


def test_filters_and_chosen_nodes(embedder):
    store = RagCacheVectorStore()
    index = over(store, embedder, documents())
    late = MetadataFilters(filters=[MetadataFilter(key="row", value=3, operator=FilterOperator.GTE)])
    found = index.as_retriever(similarity_top_k=6, filters=late).retrieve(QUESTION)
    assert sorted(one.node.metadata["row"] for one in found) == [3, 4, 5]
    few = index.as_retriever(similarity_top_k=6, doc_ids=["fact-1", "fact-2"]).retrieve(QUESTION)
    assert sorted(one.node.metadata["row"] for one in few) == [1, 2]
    assert sorted(node.metadata["row"] for node in store.get_nodes(filters=late)) == [3, 4, 5]
    store.delete_nodes(filters=late)
    assert len(store.get_nodes()) == 3
    store.clear()
    assert texts(index) == []


def test_nodes_of_other_classes_come_back_as_they_were(embedder):
    node = IndexNode(text="See the town.", index_id="towns", embedding=[1.0, 0.0])
    store = RagCacheVectorStore()
    store.add([node, TextNode(text="plain", id_="p", embedding=[0.0, 1.0])])
    (found,) = store.query(VectorStoreQuery(query_embedding=[1.0, 0.0], similarity_top_k=1)).nodes
    assert isinstance(found, IndexNode)
    assert (found.text, found.index_id, found.node_id) == (node.text, "towns", node.node_id)


def test_other_modes_are_refused():
    store = RagCacheVectorStore()
    with pytest.raises(ValueError, match="default query mode"):
        store.query(VectorStoreQuery(query_embedding=[1.0], mode=VectorStoreQueryMode.SPARSE))
    with pytest.raises(ValueError, match="by embedding"):
        store.query(VectorStoreQuery(query_str="text"))
