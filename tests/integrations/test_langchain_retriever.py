"""RagCacheRetriever: what is cached, what is not, and that a cache never costs an answer."""

import pytest
from fake_engine import FakeEngine
from integration_kit import Calls
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableLambda
from langchain_core.vectorstores import InMemoryVectorStore
from pydantic import ConfigDict, Field

from langchain_ragcachekit import RagCacheRetriever

QUESTION = "Where was Ada Lind born?"


class Events(BaseCallbackHandler):
    """Names and data of custom events, and the runs of retrievers that were started."""

    def __init__(self):
        self.seen, self.runs = [], []

    def on_custom_event(self, name, data, **kwargs):
        self.seen.append((name.removeprefix("ragcachekit_query_"), data))

    def on_retriever_start(self, serialized, query, *, name=None, **kwargs):
        self.runs.append(name)


class Listed(BaseRetriever):
    """Returns the first k documents; counts how often it was asked. It says what its results depend on."""

    documents: list
    k: int = 2
    asked: Calls = Field(default_factory=Calls)
    model_config = ConfigDict(arbitrary_types_allowed=True)

    def cache_key_parts(self):
        return self.documents, self.k

    def _get_relevant_documents(self, query, *, run_manager):
        self.asked.append(query)
        return self.documents[: self.k]


class Plain(InMemoryVectorStore):
    """Counts its searches; ``filter`` and ``mark`` are plain data here, as in database stores."""

    __module__ = "langchain_core.vectorstores"  # taken for one of LangChain's own

    def __init__(self, embedding):
        super().__init__(embedding)
        self.by_text, self.by_vector = Calls(), Calls()

    def similarity_search(self, query, k=4, filter=None, **kwargs):
        self.by_text.append((query, k, filter))
        return self._found(self.embedding.embed_query(query), k, filter)

    async def asimilarity_search(self, query, k=4, filter=None, **kwargs):
        return self.similarity_search(query, k, filter, **kwargs)

    def similarity_search_by_vector(self, embedding, k=4, filter=None, **kwargs):
        self.by_vector.append((k, filter))
        return self._found(embedding, k, filter)

    def _found(self, embedding, k, wanted):
        def test(document):
            return all(document.metadata[name] == value for name, value in (wanted or {}).items())

        return [d for d, *_ in self._similarity_search_with_score_by_vector(embedding, k, test)]


def everybody(question, config):
    """A partition for results that depend on the question alone."""
    return ()


@pytest.fixture
def store(embeddings, documents):
    store = Plain(embeddings)
    store.add_documents(documents)
    return store


def ids(documents):
    return [document.id for document in documents]


def test_tolerance_decides_about_near_questions(store):
    near = "And " + QUESTION
    exact, loose = (RagCacheRetriever.wrap(store, tolerance=one, guard=False) for one in (0.0, 0.2))
    for retriever, searches in ((exact, 2), (loose, 1)):
        store.by_text.clear()
        events = Events()
        for question in (QUESTION, near):
            retriever.invoke(question, {"callbacks": [events]})
        assert len(store.by_text) == searches
        assert [name for name, _ in events.seen] == ["miss", "hit" if retriever is loose else "miss"]
    distance = events.seen[1][1]["distance"]
    assert 0 < distance <= 0.2
    assert events.seen[1][1]["lookup_us"] > 0
    assert events.seen[0][1]["distance"] is None


async def test_one_question_is_embedded_once(embeddings, documents):
    store = InMemoryVectorStore(embeddings)
    store.add_documents(documents)
    retriever = RagCacheRetriever.wrap(store, k=2)
    assert retriever.invoke(QUESTION) == store.similarity_search(QUESTION, 2)
    embeddings.asked.clear()
    for question in ("What does Norda build?", "Is Rome a town?"):
        found = retriever.invoke(question) if "Norda" in question else await retriever.ainvoke(question)
        assert embeddings.asked == [question]
        assert found == store.similarity_search(question, 2)
        embeddings.asked.clear()


def test_a_store_that_may_use_the_text_goes_by_text(embeddings, documents):
    class Hybrid(Plain):
        __module__ = "langchain_core.vectorstores"

        def similarity_search(self, query, k=4, filter=None, **kwargs):
            return super().similarity_search(query, k, filter)[::-1]

    store = Hybrid(embeddings)
    store.add_documents(documents)
    retriever = RagCacheRetriever.wrap(store)
    for question in (QUESTION, "What does Norda build?", "Is Rome a town?"):
        assert retriever.invoke(question) == store.similarity_search(question)
    assert store.by_vector == []


def test_k_filters_and_search_arguments_are_forwarded_and_keyed(store):
    retriever = RagCacheRetriever.wrap(store, k=3)
    asked = [
        ({}, 3),
        ({"k": 1}, 1),
        ({"k": 3}, 3),
        ({"k": 3, "filter": {"row": 2}}, 1),
        ({"k": 3, "filter": {"row": 4}}, 1),
        ({"k": 3, "filter": {"row": 2}}, 1),
    ]
    found = [retriever.invoke(QUESTION, **kwargs) for kwargs, _ in asked]
    assert [len(documents) for documents in found] == [number for _, number in asked]
    assert ids(found[3]) == ids(found[5]) == ["doc-2"]
    assert ids(found[4]) == ["doc-4"]
    searched = len(store.by_text) + len(store.by_vector)
    for kwargs, _ in asked:
        retriever.invoke(QUESTION, **kwargs)
    assert len(store.by_text) + len(store.by_vector) == searched


@pytest.mark.parametrize("k", [0, -1, 2.5, True, "3"])
def test_a_bad_k_is_refused(store, k):
    retriever = RagCacheRetriever.wrap(store)
    with pytest.raises((ValueError, TypeError), match="k must be"):
        retriever.invoke(QUESTION, k=k)


def test_inner_runs_and_events_belong_to_the_callers_run(documents, embeddings):
    events = Events()
    retriever = RagCacheRetriever.wrap(Listed(documents=documents), embeddings=embeddings)
    for _ in range(2):
        retriever.invoke(QUESTION, {"callbacks": [events]})
    assert events.runs == ["RagCacheRetriever", "Listed", "RagCacheRetriever"]
    assert [name for name, _ in events.seen] == ["miss", "hit"]


def test_namespaces_are_apart_and_default_to_the_engines(store):
    engine = FakeEngine()
    engine.namespace = "acme"
    retriever = RagCacheRetriever.wrap(store, rag=engine, k=1)
    other = retriever.model_copy(update={"namespace": "other"})
    retriever.invoke(QUESTION)
    other.invoke(QUESTION)
    assert retriever.query_cache.stats().hits == 0
    retriever.invoke(QUESTION)
    assert retriever.query_cache.stats().hits == 1
    assert [namespace for namespace, _ in engine.registered] == ["acme", "other", "acme"]
    assert all(texts == [store.get_by_ids(["doc-0"])[0].page_content] for _, texts in engine.registered)
    assert engine.prefetched == engine.registered


def test_an_error_of_the_search_is_passed_on_once(embeddings):
    asked = []

    def broken(question):
        asked.append(question)
        raise OSError("index away")

    retriever = RagCacheRetriever.wrap(RunnableLambda(broken), embeddings=embeddings)
    with pytest.raises(OSError, match="index away"):
        retriever.invoke(QUESTION)
    assert len(asked) == 1
