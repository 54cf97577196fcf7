"""Nobody gets another user's documents: the ways in which a retriever learns who is asking."""

import array
import asyncio
import contextvars
import copy
import functools
import gc
import threading
import types
from dataclasses import dataclass

import numpy as np
import pytest
from fake_engine import FakeEngine
from integration_kit import BAD, GOOD, Calls, WordEmbeddings
from langchain_classic.retrievers import EnsembleRetriever, MergerRetriever, MultiVectorRetriever
from langchain_classic.storage import EncoderBackedStore
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.indexing import InMemoryRecordManager, index
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import ConfigurableField, RunnableLambda, RunnablePassthrough, ensure_config
from langchain_core.stores import InMemoryByteStore
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore
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
    per_user.clear()
    assert users(chain.invoke(QUESTION, run_of("b"))) == {"b"}
    before = per_user._retrieval.stats().hits
    assert users(chain.invoke(QUESTION, run_of("b"))) == {"b"}
    assert per_user._retrieval.stats().hits == before + 1


async def test_configurable_search_arguments_stay_each_users_own_in_async_chains(per_user):
    chain = per_user | RunnableLambda(lambda found: found)
    found = await asyncio.gather(*[chain.ainvoke(QUESTION, run_of(user)) for user in "abab"])
    assert [users(documents) for documents in found] == [{"a"}, {"b"}, {"a"}, {"b"}]
    found = await chain.abatch([QUESTION] * 4, [run_of(user) for user in "baba"])
    assert [users(documents) for documents in found] == [{"b"}, {"a"}, {"b"}, {"a"}]


def test_configurable_alternatives_stay_apart(documents):
    class Everything(Own):
        def cache_key_parts(self):
            return self.documents

        def _get_relevant_documents(self, query, *, run_manager):
            return self.documents

    inner = Everything(documents=documents[:3]).configurable_alternatives(
        ConfigurableField(id="tenant"), default_key="a", b=Everything(documents=documents[3:])
    )
    retriever = RagCacheRetriever.wrap(inner, embeddings=WordEmbeddings())
    for tenant in "abab":
        config = {"configurable": {"tenant": tenant}}
        assert users(retriever.invoke(QUESTION, config)) == {tenant}
        assert users((retriever | RunnableLambda(lambda x: x)).invoke(QUESTION, config)) == {tenant}
    assert retriever._retrieval.stats().hits == 6


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
        assert retriever._retrieval.stats().hits == (2 if custom else 0)


def test_configurable_values_that_nobody_reads_cost_no_hit(store):
    retriever = RagCacheRetriever.wrap(store)
    for thread in range(3):
        retriever.invoke(QUESTION, {"configurable": {"thread_id": thread, "__runtime": print}})
    assert retriever._retrieval.stats().hits == 2


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
    assert retriever._retrieval.stats().hits == (6 if named else 0)
    said = [r.getMessage() for r in caplog.records if "pass partition= to name" in r.getMessage()]
    assert len(said) == (not named) + (nested == "in our own wrapper"), (
        "once for each wrapper that does not cache"
    )


def test_an_inner_retrievers_search_arguments_are_seen(store):
    inner = store.as_retriever(search_kwargs={"namespace": "a"})
    retriever = RagCacheRetriever.wrap(
        EnsembleRetriever(retrievers=[inner], weights=[1.0]), embeddings=WordEmbeddings()
    )
    for user in "abab":
        inner.search_kwargs["namespace"] = user
        assert users(retriever.invoke(QUESTION)) == {user}
    assert retriever._retrieval.stats().hits == 2


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
    assert retriever._retrieval.stats().hits == 2
    assert (QUESTION, "guest") in seen


def test_a_failing_partition_costs_no_answer(documents, caplog):
    retriever = RagCacheRetriever.wrap(
        Own(documents=documents), embeddings=WordEmbeddings(), partition=lambda question, config: 1 / 0
    )
    assert users(retriever.invoke(QUESTION)) == {"a"}
    assert "ZeroDivisionError" in caplog.text
    with pytest.raises(ValueError, match="partition= must be a function of"):
        RagCacheRetriever.wrap(Own(documents=documents), embeddings=WordEmbeddings(), partition="user")


def test_a_result_found_after_a_switch_is_not_kept_for_the_user_before(documents):
    class Switched(ByField):
        def cache_key_parts(self):
            return self.filter, self.documents

        def _get_relevant_documents(self, query, *, run_manager):
            if switch:
                self.filter = {"user": switch.pop()}  # another thread serves its user just now
            return super()._get_relevant_documents(query, run_manager=run_manager)

    switch = Calls("b")
    inner = Switched(documents=documents)
    retriever = RagCacheRetriever.wrap(inner, embeddings=WordEmbeddings())
    assert users(retriever.invoke(QUESTION)) == {"b"}  # as of the bare retriever
    inner.filter = {"user": "a"}
    assert users(retriever.invoke(QUESTION)) == {"a"}


# -- the index -------------------------------------------------------------------------------------


def test_changes_of_the_store_are_seen(store):
    retriever = RagCacheRetriever.wrap(store.as_retriever(search_kwargs={"k": 1, "namespace": "a"}))
    text = "Ada Lind was born in Bern, and where she was born"
    assert retriever.invoke(QUESTION)[0].id == "a0"
    store.add_documents([Document(text, id="new", metadata={"user": "a"})])
    assert retriever.invoke(QUESTION)[0].id == "new"
    assert retriever._retrieval.stats().hits == 0
    store.delete(["new"])
    assert retriever.invoke(QUESTION)[0].id == "a0"
    assert retriever.invoke(QUESTION)[0].id == "a0"
    assert retriever._retrieval.stats().hits == 1


async def test_asynchronous_changes_are_seen(store):
    retriever = RagCacheRetriever.wrap(store.as_retriever(search_kwargs={"k": 1, "namespace": "a"}))
    await retriever.ainvoke(QUESTION)
    await store.aadd_texts(["Where was Ada Lind born"], [{"user": "a"}], ids=["new"])
    assert (await retriever.ainvoke(QUESTION))[0].id == "new"
    await store.adelete(["new"])
    assert (await retriever.ainvoke(QUESTION))[0].id == "a0"


def test_a_store_exchanged_for_another_is_seen(store, documents):
    store.delete([f"b{n}" for n in range(3)])
    inner = store.as_retriever(search_kwargs={"k": 1})
    retriever = RagCacheRetriever.wrap(inner)
    assert users(retriever.invoke(QUESTION)) == {"a"}
    other = Namespaced(store.embedding)
    other.add_documents(documents[3:])
    inner.vectorstore = other
    assert users(retriever.invoke(QUESTION)) == {"b"}


def test_an_observed_store_stays_what_it_was(store):
    RagCacheRetriever.wrap(store).invoke(QUESTION)
    assert isinstance(store, Namespaced)
    assert type(store).__name__ == "Namespaced"
    twin = copy.copy(store)
    assert type(twin) is Namespaced
    twin.store = {}
    twin.add_texts(["of the twin"], ids=["twin"])
    assert store.get_by_ids(["twin"]) == []
    assert type(copy.deepcopy(store)) is Namespaced


async def test_an_observed_store_adds_as_before(documents):
    class OnlyTexts(VectorStore):
        """The least that LangChain asks for."""

        def __init__(self):
            self.texts = []

        def add_texts(self, texts, metadatas=None, *, ids=None, **kwargs):
            self.texts += texts
            return [str(n) for n, _ in enumerate(self.texts)]

        def similarity_search(self, query, k=4, **kwargs):
            return [Document(text, metadata={"user": "a"}) for text in self.texts[-k:]]

        @classmethod
        def from_texts(cls, texts, embedding, **kwargs):
            raise NotImplementedError

        def cache_key_parts(self):
            return ()

    store = OnlyTexts()
    retriever = RagCacheRetriever.wrap(
        store.as_retriever(search_kwargs={"k": 1}), embeddings=WordEmbeddings()
    )
    adds = (store.add_texts, store.aadd_texts, store.add_documents, store.aadd_documents)
    for number, add in enumerate(adds):
        text = f"text {number}"
        added = add([text] if "texts" in add.__name__ else [Document(text)])
        if asyncio.iscoroutine(added):
            await added
        assert [d.page_content for d in retriever.invoke(QUESTION)] == [text]
        assert [d.page_content for d in retriever.invoke(QUESTION)] == [text]
    assert retriever._retrieval.stats().hits == len(adds)
    with pytest.raises(ValueError, match="has not implemented the delete method"):
        index([], InMemoryRecordManager("ns"), store, cleanup="full", key_encoder="sha256")


def test_the_indexing_api_is_seen(store, documents):
    retriever = RagCacheRetriever.wrap(store.as_retriever(search_kwargs={"k": 1, "namespace": "c"}))
    records = InMemoryRecordManager("ns")
    records.create_schema()
    for text in ("Ada Lind was born in Rome", "Ada Lind was born in Oslo"):
        new = Document(text, metadata={"user": "c", "source": "s"})
        index([new], records, store, cleanup="incremental", source_id_key="source", key_encoder="sha256")
        assert [d.page_content for d in retriever.invoke(QUESTION)] == [text]
    retriever.invoke(QUESTION)
    assert retriever._retrieval.stats().hits == 1


def test_an_index_that_is_exchanged_and_gone_disturbs_nothing(store, documents, rag):
    inner = store.as_retriever(search_kwargs={"k": 1})
    retriever = RagCacheRetriever.wrap(inner, cache=rag, capacity=2)
    found = [retriever.invoke(question)[0].page_content for question in (QUESTION, "It snows")]
    rag.encode(found)
    for _ in range(3):  # rebuilt every night
        new = Namespaced(store.embedding)
        new.add_documents(documents)
        inner.vectorstore = new
        del new
        gc.collect()
        retriever.invoke(QUESTION)
        retriever.invoke("It snows")
        retriever._retrieval.check()
    assert rag.forget() >= 1
    assert retriever._retrieval.stats().entries == 0


def test_the_search_of_a_store_of_ones_own_is_never_replaced(documents):
    class OfUser(InMemoryVectorStore):
        def similarity_search(self, query, k=4, **kwargs):
            found = super().similarity_search(query, k=9, **kwargs)
            return [d for d in found if USER.get() in ("admin", d.metadata["user"])][:k]

        def cache_key_parts(self):
            return USER.get()

    store = OfUser(WordEmbeddings())
    store.add_documents(documents)
    retriever = RagCacheRetriever.wrap(store)
    for user, wanted in (("admin", {"a", "b"}), ("a", {"a"}), ("b", {"b"}), ("a", {"a"})):
        USER.set(user)
        for question in (QUESTION, "Who paints boats?"):
            assert users(retriever.invoke(question)) == wanted


@pytest.mark.parametrize(
    "sibling", [array.array("I", [1]), types.MappingProxyType({"x": 1}), tuple(range(9000))]
)
def test_no_value_hides_its_neighbours(store, sibling):
    class Loose(Namespaced):
        __module__ = "langchain_core.vectorstores"

        def similarity_search(self, query, k=4, namespace=None, allowed=None, **kwargs):
            return super().similarity_search(query, k, namespace)

    loose = Loose(store.embedding)
    loose.store = store.store
    inner = loose.as_retriever(search_kwargs={"namespace": "a", "allowed": sibling})
    retriever = RagCacheRetriever.wrap(inner)
    for user in "abab":
        inner.search_kwargs["namespace"] = user
        assert users(retriever.invoke(QUESTION)) == {user}


@dataclass(frozen=True)
class AllowedForNow:
    field: str = "user"

    def __call__(self, document):
        return document.metadata[self.field] == USER.get()


class CallableDict(dict):
    def __call__(self, document):
        return document.metadata["user"] == USER.get()


class CallableEmbeddings(WordEmbeddings):
    def __call__(self, document):
        return document.metadata["user"] == USER.get()


class CallableHandler(BaseCallbackHandler):
    def __call__(self, document):
        return document.metadata["user"] == USER.get()


CALLABLES = {
    "a dataclass": AllowedForNow,
    "a dict": CallableDict,
    "embeddings": CallableEmbeddings,
    "a handler": CallableHandler,
    "a partial": lambda: functools.partial(CallableDict.__call__, {}),
}


@pytest.mark.parametrize("kind", CALLABLES)
@pytest.mark.parametrize("nested", [False, True])
def test_what_can_be_called_is_never_taken_for_data(documents, kind, nested):
    store = InMemoryVectorStore(WordEmbeddings())
    store.add_documents(documents)
    inner = store.as_retriever(search_kwargs={"filter": CALLABLES[kind](), "k": 6})
    wrapped = EnsembleRetriever(retrievers=[inner], weights=[1.0]) if nested else inner
    retriever = RagCacheRetriever.wrap(wrapped, embeddings=WordEmbeddings())
    for user in "abab":
        USER.set(user)
        assert users(retriever.invoke(QUESTION)) == {user}


def test_functions_among_the_arguments_count_beside_a_partition(documents):
    store = InMemoryVectorStore(WordEmbeddings())
    store.add_documents(documents)
    retriever = RagCacheRetriever.wrap(store, partition=lambda question, config: "everybody")
    for user in "abab":
        found = retriever.invoke(QUESTION, filter=lambda d, user=user: d.metadata["user"] == user)
        assert users(found) == {user}


def test_functions_inside_a_store_are_seen(documents):
    def of_user(prefix, key):
        return f"{prefix}/{USER.get()}/{key}"

    raw = InMemoryByteStore()
    for user in "ab":
        USER.set(user)
        raw.mset([(of_user("p", "1"), user.encode())])
    docs = EncoderBackedStore(
        raw,
        functools.partial(of_user, "p"),
        lambda document: document.page_content.encode(),
        lambda data: Document(data.decode(), metadata={"user": data.decode()}),
    )
    vectors = InMemoryVectorStore(WordEmbeddings())
    vectors.add_documents([Document("Ada Lind was born in Bern", metadata={"doc_id": "1"})])
    inner = MultiVectorRetriever(vectorstore=vectors, docstore=docs)
    retriever = RagCacheRetriever.wrap(inner, embeddings=WordEmbeddings())
    for user in "abab":
        USER.set(user)
        assert users(retriever.invoke(QUESTION)) == {user}


def test_functions_among_the_settings_of_a_store_are_seen(documents):
    class Defaults(Namespaced):
        __module__ = "langchain_core.vectorstores"
        defaults = None

        def similarity_search(self, query, k=4, **kwargs):
            return super().similarity_search(query, k, self.defaults["user"]())

    store = Defaults(WordEmbeddings())
    store.defaults = {"user": lambda: USER.get()}
    store.add_documents(documents)
    retriever = RagCacheRetriever.wrap(store)
    for user in "abab":
        USER.set(user)
        assert users(retriever.invoke(QUESTION)) == {user}


def test_settings_inside_a_store_are_compared_by_value(documents):
    class Defaults(Namespaced):
        __module__ = "langchain_core.vectorstores"

        def __init__(self, embedding):
            super().__init__(embedding)
            self.defaults = {"filter": {"user": "a"}}

        def similarity_search(self, query, k=4, **kwargs):
            return super().similarity_search(query, k, self.defaults["filter"]["user"])

        def similarity_search_by_vector(self, embedding, k=4, **kwargs):
            return super().similarity_search_by_vector(embedding, k, self.defaults["filter"]["user"])

    store = Defaults(WordEmbeddings())
    store.add_documents(documents)
    retriever = RagCacheRetriever.wrap(store)
    for user in "abab":
        store.defaults["filter"]["user"] = user
        assert users(retriever.invoke(QUESTION)) == {user}
    assert retriever._retrieval.stats().hits == 2


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
    assert retriever._retrieval.stats().hits == 2


def test_a_subclass_of_ours_does_not_inherit_what_ours_says(store):
    class Mine(RagCacheRetriever):
        def _get_relevant_documents(self, query, *, run_manager, **kwargs):
            found = super()._get_relevant_documents(query, run_manager=run_manager, **kwargs)
            return [d for d in found if d.metadata["user"] == USER.get()]

    inner = MergerRetriever(retrievers=[Mine.wrap(store.as_retriever(search_kwargs={"k": 6}))])
    retriever = RagCacheRetriever.wrap(inner, embeddings=store.embedding)
    for user in "abab":
        USER.set(user)
        assert users(retriever.invoke(QUESTION)) == {user}


def test_numbers_that_the_wrapped_retriever_takes_are_its_own_matter(documents):
    class Odd(Own):
        k: object = 1.5
        search_kwargs: object = ("not", "a", "mapping")

        def cache_key_parts(self):
            return self.k, self.documents

    retriever = RagCacheRetriever.wrap(Odd(documents=documents), embeddings=WordEmbeddings())
    for k in (np.int64(2), 0, None, "auto", 1.5):
        retriever.retriever.k = k
        assert users(retriever.invoke(QUESTION)) == {"a"}


def test_metadata_that_cannot_be_copied_costs_no_answer(documents):
    documents[0].metadata["lock"] = threading.Lock()
    inner = Own(documents=documents)
    retriever = RagCacheRetriever.wrap(inner, embeddings=WordEmbeddings(), partition=lambda *_: "all")
    for _ in range(2):
        assert retriever.invoke(QUESTION)[0].metadata["lock"] is documents[0].metadata["lock"]


@pytest.mark.parametrize("named", [False, True])
def test_partition_sees_changes_of_stores_in_fields_and_of_those_that_it_names(store, named):
    class Searching(Own):
        store: object = None

        def _get_relevant_documents(self, query, *, run_manager):
            return store.similarity_search(query, k=5)

    inner = Searching(documents=[], store=None if named else store)
    retriever = RagCacheRetriever.wrap(
        inner, embeddings=store.embedding, partition=lambda *_: ("all", store if named else None)
    )
    first = [d.id for d in retriever.invoke(QUESTION)]
    store.delete(first[:1])
    assert first[0] not in [d.id for d in retriever.invoke(QUESTION)]


def test_what_is_too_large_is_not_cached_and_said_once(store, caplog):
    inner = store.as_retriever(search_kwargs={"namespace": "a", "allowed": [[n] for n in range(5000)]})
    retriever = RagCacheRetriever.wrap(inner)
    for _ in range(3):
        assert retriever._retrieval.partitioner.partition("n", 1, inner, ()) is None
    assert ["too much of it" in r.getMessage() for r in caplog.records] == [True]


# -- forgetting ------------------------------------------------------------------------------------


def test_a_forgotten_text_is_not_found_in_the_cache(store, rag):
    inner = store.as_retriever(search_kwargs={"k": 2, "namespace": "a"})
    retriever = RagCacheRetriever.wrap(inner, cache=rag)
    found = [d.page_content for d in retriever.invoke(QUESTION)]
    retriever.invoke(QUESTION)
    assert retriever._retrieval.stats().hits == 1
    store.store.pop("a0")  # past the store's methods, as another process would
    rag.forget(texts=[found[0]])
    again = [d.page_content for d in retriever.invoke(QUESTION)]
    assert found[0] not in again
    assert found[0] not in rag.components.parser.registry._namespaces["default"].lru


def test_forgetting_by_id_and_whole_namespaces_reaches_the_cache(store, rag):
    retriever = RagCacheRetriever.wrap(store, cache=rag, k=1)
    other = RagCacheRetriever.wrap(store, cache=rag, k=1, namespace="other")
    (chunk,) = rag.encode([retriever.invoke(QUESTION)[0].page_content])
    other.invoke(QUESTION)
    rag.forget([chunk])
    assert [r._retrieval.stats().entries for r in (retriever, other)] == [0, 1]
    retriever.invoke(QUESTION)
    rag.forget(namespace="other")
    assert [r._retrieval.stats().entries for r in (retriever, other)] == [1, 0]


def test_a_result_of_before_a_forget_is_not_registered_after_it(documents):
    class Forgetting(Own):
        def _get_relevant_documents(self, query, *, run_manager):
            found = self.documents[:1]
            for cache in engine.query_caches:  # the forget ends while the search is under way
                cache.forget_texts("default", lambda text: text == found[0].page_content)
            return found

    engine = FakeEngine()
    retriever = RagCacheRetriever.wrap(
        Forgetting(documents=documents),
        embeddings=WordEmbeddings(),
        cache=engine,
        partition=lambda question, config: "all",
    )
    assert len(retriever.invoke(QUESTION)) == 1
    assert engine.registered == []
    assert retriever._retrieval.stats().entries == 0


# -- embeddings that are of no use -----------------------------------------------------------------


@pytest.mark.parametrize("metric", ["cosine", "l2"])
@pytest.mark.parametrize("kind", BAD)
async def test_bad_embeddings_cost_no_answer(documents, kind, metric):
    class Odd(WordEmbeddings):
        def embed_query(self, text):
            return GOOD if text == "good" else BAD[kind]

    inner = Own(documents=documents)
    retriever = RagCacheRetriever.wrap(inner, embeddings=Odd(), metric=metric, partition=lambda *_: "all")
    for question in ("good", "bad", "other", "good"):
        assert users(retriever.invoke(question)) == {"a"}
        assert users(await retriever.ainvoke(question)) == {"a"}
    assert inner._calls.count("good") == 1
    assert {"bad", "other"} <= set(inner._calls)
