"""LlamaIndex's RagCacheRetriever: copies, scores, namespaces, settings, failures."""

import pytest
from fake_engine import FakeEngine
from integration_kit import FACTS, Calls, WordEmbeddings
from llama_index.core import VectorStoreIndex
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import IndexNode, NodeWithScore, QueryBundle, TextNode
from llama_kit import Embedder, seeing

from llama_index_ragcachekit import QueryCacheEvent, RagCacheRetriever
from llama_index_ragcachekit.retriever import copied

QUESTION = "Where was Ada Lind born?"


class Listed(BaseRetriever):
    """Returns its nodes; counts how often it was asked, and with what."""

    def __init__(self, nodes):
        super().__init__()
        self.nodes, self.asked = nodes, Calls()

    def cache_key_parts(self):
        return [node.node_id for node in self.nodes], vars(self).get("_filters")

    def _retrieve(self, query_bundle):
        self.asked.append(query_bundle)
        return [NodeWithScore(node=node, score=0.5) for node in self.nodes]


@pytest.fixture
def index(embedder):
    nodes = [TextNode(text=text, id_=f"node-{n}", metadata={"row": n}) for n, text in enumerate(FACTS)]
    return VectorStoreIndex(nodes, embed_model=embedder)


def ids(found):
    return [item.node.node_id for item in found]


def test_a_second_equal_question_is_a_hit_with_its_scores(index, embedder):
    inner = index.as_retriever(similarity_top_k=2)
    retriever = RagCacheRetriever(inner, embed_model=embedder)
    with seeing(QueryCacheEvent) as seen:
        first, second = retriever.retrieve(QUESTION), retriever.retrieve(QUESTION)
    assert ids(first) == ids(second) == ids(inner.retrieve(QUESTION))
    assert ids(first)[0] == "node-0"
    assert all(item.score is not None for item in first)
    assert [item.score for item in second] == [item.score for item in first]
    assert [(event.hit, event.distance) for event in seen.events] == [(False, None), (True, 0.0)]
    assert all(event.lookup_us > 0 for event in seen.events)


def test_the_question_is_embedded_once_and_the_bundle_left_alone(index, embedder):
    retriever = RagCacheRetriever(index.as_retriever(), embed_model=embedder)
    bundle = QueryBundle(QUESTION)
    retriever.retrieve(bundle)
    assert embedder.asked == [QUESTION]
    assert bundle.embedding is None
    other = RagCacheRetriever(index.as_retriever(), embed_model=Embedder(asked=[]))
    other.retrieve(bundle)
    assert embedder.asked == [QUESTION, QUESTION]  # an embedding of another model is not passed on


def test_an_embedding_in_the_bundle_is_used(index, embedder):
    retriever = RagCacheRetriever(index.as_retriever(similarity_top_k=1), embed_model=embedder)
    bundle = QueryBundle("anything", embedding=WordEmbeddings().embed_query(FACTS[2]))
    assert ids(retriever.retrieve(bundle)) == ids(retriever.retrieve(bundle)) == ["node-2"]
    assert embedder.asked == []
    assert retriever.query_cache.stats().hits == 1


def test_custom_strings_are_what_is_embedded_and_keyed(index, embedder):
    retriever = RagCacheRetriever(index.as_retriever(similarity_top_k=1), embed_model=embedder, tolerance=0.1)

    def asked(strings):
        return ids(retriever.retrieve(QueryBundle("anything", custom_embedding_strs=strings)))

    assert asked([FACTS[2]]) == asked([FACTS[2]]) == ["node-2"]
    assert asked([FACTS[4]]) == ["node-4"]
    assert embedder.asked == [FACTS[2], FACTS[2], FACTS[4]]
    assert retriever.query_cache.stats().hits == 1
    asked(["Hello, " + FACTS[2]])
    assert retriever.query_cache.stats().hits == 2
    asked([FACTS[2].replace("It builds", "It never builds")])
    assert retriever.query_cache.stats().hits == 2  # as near, but the strings say another thing


def test_nodes_are_copies_and_what_they_point_to_is_shared(embedder):
    target = Listed([])
    nodes = [TextNode(text="some text", metadata={"tags": ["a"]}), IndexNode(text="x", index_id="i")]
    retriever = RagCacheRetriever(Listed(nodes), embed_model=embedder)
    retriever.retrieve(QUESTION)
    for _ in range(2):
        first = retriever.retrieve(QUESTION)[0].node
        assert (first.text, first.metadata) == ("some text", {"tags": ["a"]})
        first.metadata["tags"].append("b")
        first.set_content("changed")
    pointing = NodeWithScore(node=IndexNode(text="x", index_id="i", obj=target))
    assert copied(pointing).node.obj is target


def test_bare_texts_are_registered_with_the_engine(embedder):
    nodes = [TextNode(text="some text", metadata={"file": "a"}), TextNode(text=" ")]
    engine = FakeEngine()
    engine.namespace = "acme"
    retriever = RagCacheRetriever(Listed(nodes), embed_model=embedder, rag=engine)
    retriever.retrieve(QUESTION)
    retriever.retrieve(QUESTION)
    assert engine.registered == [("acme", ["some text"])] * 2
    RagCacheRetriever(Listed(nodes), embed_model=embedder, rag=engine, namespace="b").retrieve(QUESTION)
    assert engine.registered[2:] == [("b", ["some text"])]
    assert engine.prefetched == engine.registered


def test_bad_settings_are_clear_errors(embedder):
    inner = Listed([TextNode(text="some text")])
    with pytest.raises(TypeError, match="expected a LlamaIndex retriever, got str"):
        RagCacheRetriever("text", embed_model=embedder)
    with pytest.raises(ValueError, match="capacity"):
        RagCacheRetriever(inner, embed_model=embedder, capacity=0)
