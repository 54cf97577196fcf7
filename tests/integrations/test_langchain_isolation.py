"""Nobody gets another user's documents: the ways in which a retriever learns who is asking."""

import asyncio
import contextvars
import threading

import pytest
from integration_kit import Calls, WordEmbeddings
from langchain_classic.retrievers import EnsembleRetriever
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import ConfigurableField, RunnableLambda, RunnablePassthrough, ensure_config
from langchain_core.vectorstores import InMemoryVectorStore
from pydantic import ConfigDict, Field, PrivateAttr

from langchain_ragcachekit import RagCacheRetriever

QUESTION = "Where was Ada Lind born?"
USER = contextvars.ContextVar("user", default="a")


class Namespaced(InMemoryVectorStore):
    """A store with LangChain's per-user pattern: a ``namespace`` among the search arguments."""

    __module__ = "langchain_core.vectorstores"  # taken for one of LangChain's own

    def similarity_search(self, query, k=4, namespace=None, **kwargs):
        return super().similarity_search(query, k, filter=self._of(namespace), **kwargs)

    async def asimilarity_search(self, query, k=4, namespace=None, **kwargs):
        return self.similarity_search(query, k, namespace, **kwargs)

    def similarity_search_by_vector(self, embedding, k=4, namespace=None, **kwargs):
        return super().similarity_search_by_vector(embedding, k, filter=self._of(namespace), **kwargs)

    def _of(self, namespace):
        return None if namespace is None else lambda document: document.metadata["user"] == namespace


class Own(BaseRetriever):
    """A retriever of the user's own, which finds the documents of whoever ``who`` says."""

    documents: list
    model_config = ConfigDict(arbitrary_types_allowed=True, extra="allow")
    _calls: Calls = PrivateAttr(default_factory=Calls)

    def who(self, run_manager):
        return "a"

    def _get_relevant_documents(self, query, *, run_manager):
        self._calls.append(query)
        return [d for d in self.documents if d.metadata["user"] == self.who(run_manager)]


@pytest.fixture
def documents():
    texts = ("Ada Lind was born in Bern, says {}", "Bob Roth paints boats, says {}", "It snows, says {}")
    return [
        Document(text.format(user), id=f"{user}{n}", metadata={"user": user})
        for user in "ab"
        for n, text in enumerate(texts)
    ]


@pytest.fixture
def store(documents):
    store = Namespaced(WordEmbeddings())
    store.add_documents(documents)
    return store


def users(found):
    return {document.metadata["user"] for document in found}


def run_of(user):
    return {"configurable": {"search_kwargs": {"namespace": user}}}


@pytest.fixture
def per_user(store):
    field = ConfigurableField(id="search_kwargs")
    inner = store.as_retriever(search_kwargs={"namespace": "a"}).configurable_fields(search_kwargs=field)
    return RagCacheRetriever.wrap(inner)


def test_configurable_search_arguments_stay_each_users_own(per_user):
    chain = {"found": per_user, "question": RunnablePassthrough()} | RunnableLambda(lambda x: x["found"])
    for invoke in (per_user.invoke, chain.invoke):
        assert users(invoke(QUESTION, run_of("a"))) == {"a"}
        assert users(invoke(QUESTION, run_of("b"))) == {"b"}
        assert users(invoke(QUESTION)) == {"a"}
    per_user.query_cache.clear()
    assert users(chain.invoke(QUESTION, run_of("b"))) == {"b"}
    before = per_user.query_cache.stats().hits
    assert users(chain.invoke(QUESTION, run_of("b"))) == {"b"}
    assert per_user.query_cache.stats().hits == before + 1


async def test_configurable_search_arguments_stay_each_users_own_in_async_chains(per_user):
    chain = per_user | RunnableLambda(lambda found: found)
    found = await asyncio.gather(*[chain.ainvoke(QUESTION, run_of(user)) for user in "abab"])
    assert [users(documents) for documents in found] == [{"a"}, {"b"}, {"a"}, {"b"}]
    found = await chain.abatch([QUESTION] * 4, [run_of(user) for user in "baba"])
    assert [users(documents) for documents in found] == [{"b"}, {"a"}, {"b"}, {"a"}]


def test_a_configurable_value_read_by_own_code_is_never_another_users(documents):
    def search(question):
        user = ensure_config()["configurable"].get("user", "a")
        return [d for d in documents if d.metadata["user"] == user]

    for custom in (None, lambda question, config: config["configurable"]["user"]):
        retriever = RagCacheRetriever.wrap(
            RunnableLambda(search), embeddings=WordEmbeddings(), partition=custom
        )
        for user in "abab":
            assert users(retriever.invoke(QUESTION, {"configurable": {"user": user}})) == {user}
        assert retriever.query_cache.stats().hits == (2 if custom else 0)


class ByField(Own):
    filter: dict = Field(default_factory=lambda: {"user": "a"})

    def who(self, run_manager):
        return self.filter["user"]


class ByContext(Own):
    def who(self, run_manager):
        return USER.get()


class ByHandler(Own, BaseCallbackHandler):
    user: str = "a"

    def who(self, run_manager):
        return self.user


def by_closure(documents):
    seen = {"user": "a"}

    class ByClosure(Own):
        def who(self, run_manager):
            return seen["user"]

    return ByClosure(documents=documents), lambda user: seen.update(user=user)


SWITCHED = {
    "a dict field, changed": lambda d: (m := ByField(documents=d), lambda u: m.filter.update(user=u)),
    "a dict field, set": lambda d: (m := ByField(documents=d), lambda u: setattr(m, "filter", {"user": u})),
    "a context variable": lambda d: (ByContext(documents=d), USER.set),
    "a closure": by_closure,
    "a callback handler": lambda d: (m := ByHandler(documents=d), lambda u: setattr(m, "user", u)),
}


@pytest.fixture(autouse=True)
def first_user():
    yield
    USER.set("a")


@pytest.mark.parametrize("kind", SWITCHED)
@pytest.mark.parametrize("nested", ["alone", "in an ensemble", "in our own wrapper"])
@pytest.mark.parametrize("named", [False, True])
def test_whoever_the_retriever_serves_now_is_served(documents, kind, nested, named, caplog):
    inner, switch = SWITCHED[kind](documents)
    now = Calls()
    wrapped = inner
    if nested == "in an ensemble":
        wrapped = EnsembleRetriever(retrievers=[inner], weights=[1.0])
    elif nested == "in our own wrapper":
        wrapped = RagCacheRetriever.wrap(inner, embeddings=WordEmbeddings())
    partition = (lambda question, config: now[-1]) if named else None
    retriever = RagCacheRetriever.wrap(wrapped, embeddings=WordEmbeddings(), partition=partition)
    for user in "abab":
        switch(user)
        now.append(user)
        assert users(retriever.invoke(QUESTION)) == {user}
        assert users(asyncio.run(retriever.ainvoke(QUESTION))) == {user}
    assert retriever.query_cache.stats().hits == (6 if named else 0)
    said = [r.getMessage() for r in caplog.records if "pass partition= to name" in r.getMessage()]
    assert len(said) == (not named) + (nested == "in our own wrapper"), (
        "once for each wrapper that does not cache"
    )


def test_a_partition_of_the_users_own_stands_in_for_what_cannot_be_read(documents):
    class ByThread(Own):
        def who(self, run_manager):
            return getattr(there, "user", "a")

    there = threading.local()
    seen = []

    def partition(question, config):
        seen.append((question, config["configurable"]["user"]))
        there.user = config["configurable"]["user"]
        return None if there.user == "guest" else {"user": there.user}

    inner = ByThread(documents=documents)
    retriever = RagCacheRetriever.wrap(inner, embeddings=WordEmbeddings(), partition=partition)
    for user in ("a", "b", "a", "b", "guest", "guest"):
        found = retriever.invoke(QUESTION, {"configurable": {"user": user, "thread_id": object()}})
        assert users(found) == ({user} if user != "guest" else set())
    assert retriever.query_cache.stats().hits == 2
    assert (QUESTION, "guest") in seen


def test_a_failing_partition_costs_no_answer(documents, caplog):
    retriever = RagCacheRetriever.wrap(
        Own(documents=documents), embeddings=WordEmbeddings(), partition=lambda question, config: 1 / 0
    )
    assert users(retriever.invoke(QUESTION)) == {"a"}
    assert "ZeroDivisionError" in caplog.text
    with pytest.raises(ValueError, match="partition= must be a function of"):
        RagCacheRetriever.wrap(Own(documents=documents), embeddings=WordEmbeddings(), partition="user")


def test_any_library_runnable_may_read_the_configurable_values(store):
    class ByConfig(RunnableLambda):
        """Reads the config as LangChain's configurable models do."""

        __module__ = "langchain_core.runnables.configurable"

        def __init__(self):
            super().__init__(str)

        def invoke(self, input, config=None, **kwargs):
            return store.similarity_search(input, 3, config["configurable"]["model"])

    retriever = RagCacheRetriever.wrap(ByConfig(), embeddings=store.embedding)
    for user in "abab":
        found = retriever.invoke(QUESTION, {"configurable": {"model": user, "__pregel_read": print}})
        assert users(found) == {user}
    assert retriever.query_cache.stats().hits == 2


def test_forgetting_by_id_and_whole_namespaces_reaches_the_cache(store, rag):
    retriever = RagCacheRetriever.wrap(store, rag=rag, k=1)
    other = RagCacheRetriever.wrap(store, rag=rag, k=1, namespace="other")
    (chunk,) = rag.encode([retriever.invoke(QUESTION)[0].page_content])
    other.invoke(QUESTION)
    rag.forget([chunk])
    assert [r.query_cache.stats().entries for r in (retriever, other)] == [0, 1]
    retriever.invoke(QUESTION)
    rag.forget(namespace="other")
    assert [r.query_cache.stats().entries for r in (retriever, other)] == [1, 0]
