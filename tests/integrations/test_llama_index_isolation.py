"""Nobody gets another user's nodes, and changes of the index are seen."""

import asyncio

import pytest
from integration_kit import FACTS, Calls
from llama_index.core import VectorStoreIndex
from llama_index.core.indices.query.query_transform.base import IdentityQueryTransform
from llama_index.core.retrievers import (
    BaseRetriever,
    TransformRetriever,
    VectorIndexRetriever,
)
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode

from llama_index_ragcachekit import RagCacheRetriever

QUESTION = "Where was Ada Lind born?"


class Own(BaseRetriever):
    """A retriever of the user's own, which finds the nodes of whoever ``who`` says."""

    def __init__(self, nodes):
        super().__init__()
        self.nodes, self.calls, self._acl = nodes, Calls(), ["a"]

    def who(self):
        return "a"

    def _retrieve(self, query_bundle):
        self.calls.append(query_bundle)
        return [NodeWithScore(node=n, score=0.5) for n in self.nodes if n.metadata["user"] == self.who()]


class ByList(Own):
    def who(self):
        return self._acl[-1]


@pytest.fixture
def nodes():
    return [TextNode(text=t, id_=f"{u}{n}", metadata={"user": u}) for u in "ab" for n, t in enumerate(FACTS)]


@pytest.fixture
def index(nodes, embedder):
    return VectorStoreIndex(nodes, embed_model=embedder)


def users(found):
    return {item.node.metadata["user"] for item in found}


def ids(found):
    return [item.node.node_id for item in found]


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("named", [False, True])
def test_whoever_the_retriever_serves_now_is_served(nodes, embedder, nested, named, caplog):
    inner = ByList(nodes)
    wrapped, now = TransformRetriever(inner, IdentityQueryTransform()) if nested else inner, Calls()
    partition = (lambda bundle: now[-1]) if named else None
    retriever = RagCacheRetriever(wrapped, embed_model=embedder, partition=partition)
    for user in "abab":
        inner._acl.append(user)
        now.append(user)
        assert users(retriever.retrieve(QUESTION)) == {user}
        assert users(asyncio.run(retriever.aretrieve(QUESTION))) == {user}
    assert retriever.query_cache.stats().hits == (6 if named else 0)
    said = [r.getMessage() for r in caplog.records if "pass partition= to name" in r.getMessage()]
    assert len(said) == (not named)


def test_other_fields_of_a_question_count(nodes, embedder):
    class ByBundle(Own):
        def _retrieve(self, query_bundle):
            return [item for item in super()._retrieve(query_bundle) if query_bundle.user == "a"]

        def cache_key_parts(self):
            return self.nodes

    retriever = RagCacheRetriever(ByBundle(nodes), embed_model=embedder)
    for user in "abab":
        bundle = QueryBundle(QUESTION)
        bundle.user = user
        assert users(retriever.retrieve(bundle)) == ({"a"} if user == "a" else set())
    assert retriever.query_cache.stats().hits == 1


def test_changes_of_the_indexs_store_are_seen(index, embedder):
    inner = VectorIndexRetriever(index, similarity_top_k=1)  # as_retriever() fixes the nodes there are
    retriever = RagCacheRetriever(inner, embed_model=embedder)
    first = ids(retriever.retrieve(QUESTION))
    index.vector_store.delete_nodes(first)
    assert ids(retriever.retrieve(QUESTION)) != first
    assert retriever.query_cache.stats().hits == 0
    retriever.retrieve(QUESTION)
    assert retriever.query_cache.stats().hits == 1
