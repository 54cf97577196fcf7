"""Nobody gets another user's nodes, scores stay right, and bad embeddings cost no answer."""

import asyncio
import contextvars
import copy
import logging
import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from integration_kit import BAD, FACTS, GOOD, Calls
from llama_index.core import SummaryIndex, VectorStoreIndex
from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.indices.query.query_transform.base import IdentityQueryTransform
from llama_index.core.llms import MockLLM
from llama_index.core.postprocessor import SimilarityPostprocessor
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.retrievers import (
    BaseRetriever,
    QueryFusionRetriever,
    TransformRetriever,
    VectorIndexRetriever,
)
from llama_index.core.schema import Document, NodeWithScore, QueryBundle, TextNode
from llama_index.core.vector_stores import ExactMatchFilter, MetadataFilters, SimpleVectorStore
from llama_kit import Embedder

from llama_index_ragcachekit import RagCacheRetriever
from llama_index_ragcachekit.retriever import SCORE_NOTE

QUESTION = "Where was Ada Lind born?"
USER = contextvars.ContextVar("user", default="a")


class Own(BaseRetriever):
    """A retriever of the user's own, which finds the nodes of whoever ``who`` says."""

    def __init__(self, nodes):
        super().__init__()
        self.nodes, self.calls, self._acl, self.filter = nodes, Calls(), ["a"], {"user": "a"}

    def who(self):
        return "a"

    def _retrieve(self, query_bundle):
        self.calls.append(query_bundle)
        return [NodeWithScore(node=n, score=0.5) for n in self.nodes if n.metadata["user"] == self.who()]


class ByFilter(Own):
    def who(self):
        return self.filter["user"]


class ByList(Own):
    def who(self):
        return self._acl[-1]


class ByContext(Own):
    def who(self):
        return USER.get()


@pytest.fixture
def embedder():
    return Embedder(asked=[])


@pytest.fixture
def nodes():
    return [TextNode(text=t, id_=f"{u}{n}", metadata={"user": u}) for u in "ab" for n, t in enumerate(FACTS)]


@pytest.fixture
def index(nodes, embedder):
    return VectorStoreIndex(nodes, embed_model=embedder)


@pytest.fixture(autouse=True)
def first_user():
    yield
    USER.set("a")


def users(found):
    return {item.node.metadata["user"] for item in found}


def ids(found):
    return [item.node.node_id for item in found]


def of_user(user):
    return MetadataFilters(filters=[ExactMatchFilter(key="user", value=user)])


SWITCHED = {
    "a dict": lambda n: (r := ByFilter(n), lambda u: r.filter.update(user=u)),
    "a list": lambda n: (r := ByList(n), lambda u: r._acl.append(u)),
    "a context variable": lambda n: (ByContext(n), USER.set),
}


@pytest.mark.parametrize("kind", SWITCHED)
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("named", [False, True])
def test_whoever_the_retriever_serves_now_is_served(nodes, embedder, kind, nested, named, caplog):
    inner, switch = SWITCHED[kind](nodes)
    wrapped, now = TransformRetriever(inner, IdentityQueryTransform()) if nested else inner, Calls()
    partition = (lambda bundle: now[-1]) if named else None
    retriever = RagCacheRetriever(wrapped, embed_model=embedder, partition=partition)
    for user in "abab":
        switch(user)
        now.append(user)
        assert users(retriever.retrieve(QUESTION)) == {user}
        assert users(asyncio.run(retriever.aretrieve(QUESTION))) == {user}
    assert retriever._retrieval.stats().hits == (6 if named else 0)
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
    assert retriever._retrieval.stats().hits == 1


def test_changes_inside_an_index_are_seen(index, embedder):
    summary = SummaryIndex([TextNode(text="It snows in June.", id_="one")])
    retriever = RagCacheRetriever(summary.as_retriever(), embed_model=embedder)
    assert [item.node.text for item in retriever.retrieve(QUESTION)] == ["It snows in June."]
    summary.docstore.add_documents([TextNode(text="CHANGED", id_="one")])
    assert [item.node.text for item in retriever.retrieve(QUESTION)] == ["CHANGED"]
    vector = RagCacheRetriever(VectorIndexRetriever(index, similarity_top_k=1), embed_model=embedder)
    first = vector.retrieve(QUESTION)[0].node
    index.docstore.add_documents([TextNode(text="CHANGED", id_=first.node_id)])
    vector.retrieve(QUESTION)
    assert vector._retrieval.stats().hits == 0


@pytest.mark.parametrize("k", [0, None, np.int64(2), 2.0])
def test_numbers_that_the_wrapped_retriever_takes_are_its_own_matter(nodes, embedder, k):
    inner = Own(nodes)
    inner.similarity_top_k = k
    assert users(RagCacheRetriever(inner, embed_model=embedder).retrieve(QUESTION)) == {"a"}


@pytest.mark.parametrize("wrap", ["transform", "fusion", "own wrapper"])
def test_filters_of_an_inner_retriever_are_seen(index, embedder, wrap):
    inner = index.as_retriever(filters=of_user("a"))
    if wrap == "transform":
        outer = TransformRetriever(inner, IdentityQueryTransform())
    elif wrap == "fusion":
        outer = QueryFusionRetriever([inner], llm=MockLLM(), num_queries=1, use_async=False)
    else:
        outer = RagCacheRetriever(inner, embed_model=embedder)
    retriever = RagCacheRetriever(outer, embed_model=embedder)
    for user in "abab":
        inner._filters = of_user(user)
        assert users(retriever.retrieve(QUESTION)) == {user}
    assert retriever._retrieval.stats().hits == 2
    inner._filters.filters[0].value = "a"  # the same object, changed
    assert users(retriever.retrieve(QUESTION)) == {"a"}


def test_what_cannot_be_read_is_not_cached_and_said_once(nodes, embedder, caplog):
    inner = ByFilter(nodes)
    inner.filter = {"user": "a", "allowed": lambda node: True}
    retriever = RagCacheRetriever(inner, embed_model=embedder)
    for user in "aba":
        inner.filter["user"] = user
        assert users(retriever.retrieve(QUESTION)) == {user}
    assert retriever._retrieval.stats().entries == 0
    (record,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert "ByFilter may depend on anything" in record.getMessage()


def test_a_partition_of_the_users_own(nodes, embedder):
    inner = ByFilter(nodes)
    inner.filter = {"user": "a", "allowed": lambda node: True}

    def partition(bundle):
        return inner.filter["user"] if bundle.query_str == QUESTION else None

    retriever = RagCacheRetriever(inner, embed_model=embedder, partition=partition)
    for user in "abab":
        inner.filter["user"] = user
        assert users(retriever.retrieve(QUESTION)) == {user}
    assert retriever._retrieval.stats().hits == 2
    with pytest.raises(TypeError, match="partition= must be a function of a QueryBundle"):
        RagCacheRetriever(inner, embed_model=embedder, partition="user")


def test_threads_of_two_users_get_their_own_and_memory_stays_bounded(nodes, embedder):
    retriever = RagCacheRetriever(
        ByContext(nodes), embed_model=embedder, partition=lambda bundle: USER.get(), capacity=8
    )

    def ask(job):
        user, text = job
        USER.set(user)
        return user, users(retriever.retrieve(text)), retriever._retrieval.stats().entries

    jobs = [(user, text) for _ in range(20) for text in FACTS[:5] for user in "ab"]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda job: contextvars.copy_context().run(ask, job), jobs))
    assert all(found == {user} for user, found, _ in answers)
    assert max(entries for _, _, entries in answers) <= 8
    stats = retriever._retrieval.stats()
    assert stats.hits + stats.misses == len(jobs)
    assert stats.hits > 0


def test_changes_of_the_index_are_seen(index, embedder):
    inner = VectorIndexRetriever(index, similarity_top_k=1)  # as_retriever() fixes the nodes there are
    retriever = RagCacheRetriever(inner, embed_model=embedder)
    first = ids(retriever.retrieve(QUESTION))
    index.insert_nodes([TextNode(text=QUESTION, id_="new")])
    assert ids(retriever.retrieve(QUESTION)) == ["new"]
    index.delete_nodes(["new"])
    assert ids(retriever.retrieve(QUESTION)) == first
    index.insert(Document(text=QUESTION, id_="doc"))
    assert retriever.retrieve(QUESTION)[0].node.ref_doc_id == "doc"
    index.refresh_ref_docs([Document(text="It snows in June.", id_="doc")])
    assert ids(retriever.retrieve(QUESTION)) == first
    index.delete_ref_doc("doc")
    retriever.retrieve(QUESTION)
    index.vector_store.delete_nodes(first)
    assert ids(retriever.retrieve(QUESTION)) != first
    assert retriever._retrieval.stats().hits == 0
    retriever.retrieve(QUESTION)
    assert retriever._retrieval.stats().hits == 1


def test_an_observed_index_stays_what_it_was(index, embedder, tmp_path):
    RagCacheRetriever(index.as_retriever(), embed_model=embedder).retrieve(QUESTION)
    assert type(index) is VectorStoreIndex
    store = index.vector_store
    assert type(store) is SimpleVectorStore
    assert store.model_dump() == SimpleVectorStore(data=store.data).model_dump()
    assert pickle.loads(pickle.dumps(store)).data == store.data
    assert type(copy.deepcopy(store)) is SimpleVectorStore
    index.storage_context.persist(tmp_path)
    assert (tmp_path / "default__vector_store.json").exists()
    twin = store.model_copy(deep=True)
    twin.delete_nodes(["a0"])
    assert "a0" in store.data.embedding_dict


# -- scores ----------------------------------------------------------------------------------------


def test_a_repeated_question_is_answered_the_same_behind_a_cutoff(index, embedder):
    retriever = RagCacheRetriever(index.as_retriever(similarity_top_k=2), embed_model=embedder)
    engine = RetrieverQueryEngine.from_args(
        retriever, llm=MockLLM(), node_postprocessors=[SimilarityPostprocessor(similarity_cutoff=0.1)]
    )
    assert isinstance(engine, BaseQueryEngine)
    first, second = engine.query(QUESTION), engine.query(QUESTION)
    assert retriever._retrieval.stats().hits == 1
    assert str(second) == str(first) != "Empty Response"
    assert [n.score for n in second.source_nodes] == [n.score for n in first.source_nodes]


def test_scores_of_a_near_question_are_the_old_ones_and_marked(nodes, embedder):
    retriever = RagCacheRetriever(
        Own(nodes), embed_model=embedder, tolerance=0.3, guard=False, partition=lambda bundle: "all"
    )
    exact = retriever.retrieve(QUESTION)
    near = retriever.retrieve("Where was Ada Lind really born?")
    assert [item.score for item in near] == [item.score for item in exact] == [0.5] * len(FACTS)
    assert all(item.node.metadata[SCORE_NOTE] == "of the cached question" for item in near)
    assert all(SCORE_NOTE not in item.node.get_content("llm") for item in near)
    assert all(SCORE_NOTE not in item.node.metadata for item in retriever.retrieve(QUESTION))


# -- forgetting and bad embeddings -----------------------------------------------------------------


def test_a_forgotten_text_is_not_found_in_the_cache(index, embedder, rag):
    retriever = RagCacheRetriever(index.as_retriever(similarity_top_k=2), embed_model=embedder, cache=rag)
    found = retriever.retrieve(QUESTION)
    retriever.retrieve(QUESTION)
    assert retriever._retrieval.stats().hits == 1
    text = found[0].node.get_content("none")
    rag.forget(texts=[text])
    assert retriever._retrieval.stats().entries == 0
    assert text not in rag.components.parser.registry._namespaces["default"].lru


@pytest.mark.parametrize("metric", ["cosine", "l2"])
@pytest.mark.parametrize("kind", BAD)
async def test_bad_embeddings_cost_no_answer(nodes, embedder, kind, metric):
    class Odd(Embedder):
        def get_agg_embedding_from_queries(self, queries, agg_fn=None):
            return GOOD if queries == ["good"] else BAD[kind]

        async def aget_agg_embedding_from_queries(self, queries, agg_fn=None):
            return self.get_agg_embedding_from_queries(queries)

    inner = Own(nodes)
    retriever = RagCacheRetriever(
        inner, embed_model=Odd(asked=[]), metric=metric, partition=lambda bundle: "all"
    )
    for question in ("good", "bad", "other", "good"):
        assert users(retriever.retrieve(question)) == {"a"}
        assert users(await retriever.aretrieve(QueryBundle(question))) == {"a"}
    asked = [bundle.query_str for bundle in inner.calls]
    assert asked.count("good") == 1
    assert {"bad", "other"} <= set(asked)
