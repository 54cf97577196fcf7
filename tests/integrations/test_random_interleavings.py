"""Users, filters, configurables, additions, deletions and forgets in any order, against no cache at all."""

import contextvars
import random
from dataclasses import dataclass, field

import pytest
import torch
from integration_kit import WordEmbeddings
from langchain_classic.retrievers import EnsembleRetriever
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import ConfigurableField, RunnableLambda
from langchain_core.vectorstores import InMemoryVectorStore
from llama_index.core import VectorStoreIndex
from llama_index.core.indices.query.query_transform.base import IdentityQueryTransform
from llama_index.core.llms import MockLLM
from llama_index.core.retrievers import BaseRetriever as LlamaRetriever
from llama_index.core.retrievers import QueryFusionRetriever, TransformRetriever, VectorIndexRetriever
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.core.vector_stores import ExactMatchFilter, MetadataFilters
from llama_kit import Embedder
from pydantic import PrivateAttr

import langchain_ragcachekit
import llama_index_ragcachekit
from ragcachekit import Chunk, Prompt, Text
from soak_kit import figures

USERS = ("ann", "bob", "cleo")
WORDS = ("boat", "town", "snow", "bread", "cello", "bridge", "harbour", "cat")
QUESTIONS = [f"where is the {one} of the {other}" for one in WORDS[:2] for other in WORDS[4:7]]
NOW = contextvars.ContextVar("user", default=USERS[0])


PARTITIONS = {  # of some kinds; the others are of the library, say themselves what counts, or are not cached
    "alternatives": lambda question, config: (config["configurable"]["who"], NOW.get()),
}


class LibraryStore(InMemoryVectorStore):
    """A store with a plain user as filter, taken for one of LangChain's own."""

    __module__ = "langchain_core.vectorstores"

    def similarity_search(self, query, k=4, user=None, **kwargs):
        return super().similarity_search(query, k, filter=self._of(user))

    def similarity_search_by_vector(self, embedding, k=4, user=None, **kwargs):
        return super().similarity_search_by_vector(embedding, k, filter=self._of(user))

    def _of(self, user):
        return None if user is None else lambda document: document.metadata["user"] == user


@dataclass
class Run:
    """What one random run saw."""

    asked: int = 0
    generated: int = 0
    exact: int = 0  # tokens that were reused
    wrong: list = field(default_factory=list)
    returned: list = field(default_factory=list)


class LangChainWorld:
    """One store, and retrievers around it that learn in different ways who asks."""

    def __init__(self, rag):
        self.store = LibraryStore(WordEmbeddings())
        self.documents = {}
        by_field = ByField(store=self.store)
        by_list = ByList(store=self.store)
        inner = self.store.as_retriever(search_kwargs={"k": 3})
        kwargs = ConfigurableField(id="store_kwargs")
        self.kinds = {
            "configurable fields": self.store.as_retriever().configurable_fields(search_kwargs=kwargs),
            "search arguments": inner,
            "nested search arguments": EnsembleRetriever(retrievers=[inner], weights=[1.0]),
            "alternatives": ByField(store=self.store, filter={"user": USERS[0]}).configurable_alternatives(
                ConfigurableField(id="who"), default_key="list", context=ByContext(store=self.store)
            ),
            "a dict field": by_field,
            "an ensemble": EnsembleRetriever(retrievers=[by_list, by_field], weights=[0.5, 0.5]),
            "own code": RunnableLambda(lambda question: question.strip()) | inner,
        }
        self.by_field, self.by_list, self.inner = by_field, by_list, inner
        embeddings = self.store.embeddings
        self.wrapped = {
            name: langchain_ragcachekit.RagCacheRetriever.wrap(
                kind, embeddings=embeddings, rag=rag, partition=PARTITIONS.get(name)
            )
            for name, kind in self.kinds.items()
        }
        wrap = langchain_ragcachekit.RagCacheRetriever.wrap
        self.wrapped["our own"] = wrap(wrap(by_list, embeddings=embeddings), embeddings=embeddings)
        self.kinds["our own"] = by_list

    def switch(self, rng, user):
        if rng.random() < 0.5:
            self.by_field.filter["user"] = user
        else:
            self.by_field.filter = {"user": user}
        self.by_list._acl[:] = [user]
        self.inner.search_kwargs.update(k=rng.randint(1, 4), user=user)
        NOW.set(user)

    def ask(self, rng, name, question, user):
        numbers = {"k": rng.randint(1, 3), "user": user}
        configs = {
            "configurable fields": {"configurable": {"store_kwargs": numbers}},
            "alternatives": {"configurable": {"who": rng.choice(["list", "context"])}},
        }
        config = configs.get(name)
        wanted = self.kinds[name].invoke(question, config)
        got = self.wrapped[name].invoke(question, config)
        return [d.page_content for d in wanted], [d.page_content for d in got]

    def add(self, name, text, user):
        self.documents[name] = text
        self.store.add_documents([Document(text, id=name, metadata={"user": user})])

    def delete(self, name):
        self.store.delete([name])
        return self.documents.pop(name)

    def hits(self):
        return sum(one.query_cache.stats().hits for one in self.wrapped.values())


class OfStore(BaseRetriever):
    store: InMemoryVectorStore

    def who(self):
        raise NotImplementedError

    def _get_relevant_documents(self, query, *, run_manager):
        return self.store.similarity_search(query, k=3, user=self.who())


class ByField(OfStore):
    filter: dict = {"user": USERS[0]}  # noqa: RUF012

    def who(self):
        return self.filter["user"]

    def cache_key_parts(self):
        return self.filter, self.store


class ByList(OfStore):
    _acl: list = PrivateAttr(default_factory=lambda: [USERS[0]])

    def who(self):
        return self._acl[0]

    def cache_key_parts(self):
        return self._acl, self.store


class ByContext(OfStore):
    def who(self):
        return NOW.get()


LLAMA_PARTITIONS = {"a context": lambda bundle: NOW.get()}


class LlamaWorld:
    """The same with LlamaIndex."""

    def __init__(self, rag):
        embedder = Embedder(asked=[])
        self.index = VectorStoreIndex([], embed_model=embedder)
        self.documents = {}
        self.inner = VectorIndexRetriever(self.index, similarity_top_k=3)
        self.own = ByAcl(self.index)
        self.context = ByNow(self.index)
        self.kinds = {
            "a vector index": VectorIndexRetriever(self.index, similarity_top_k=2),
            "a transform": TransformRetriever(self.inner, IdentityQueryTransform()),
            "a list": self.own,
            "a fusion": QueryFusionRetriever(
                [self.inner, self.own], llm=MockLLM(), num_queries=1, use_async=False, similarity_top_k=4
            ),
            "a context": self.context,
        }
        wrap = llama_index_ragcachekit.RagCacheRetriever
        self.wrapped = {
            n: wrap(kind, embed_model=embedder, rag=rag, partition=LLAMA_PARTITIONS.get(n))
            for n, kind in self.kinds.items()
        }
        self.kinds["our own"] = self.inner
        self.wrapped["our own"] = wrap(wrap(self.inner, embed_model=embedder), embed_model=embedder)

    def switch(self, rng, user):
        self.own._acl[:] = [user]
        NOW.set(user)
        filters = MetadataFilters(filters=[ExactMatchFilter(key="user", value=user)])
        for retriever in (self.inner, self.kinds["a vector index"]):
            if retriever._filters is not None and rng.random() < 0.5:
                retriever._filters.filters[0].value = user
            else:
                retriever._filters = filters.model_copy(deep=True)
        self.inner.similarity_top_k = rng.randint(1, 4)

    def ask(self, rng, name, question, user):
        wanted, got = self.kinds[name].retrieve(question), self.wrapped[name].retrieve(question)
        return [(i.node.text, i.score) for i in wanted], [(i.node.text, i.score) for i in got]

    def add(self, name, text, user):
        self.documents[name] = text
        self.index.insert_nodes([TextNode(text=text, id_=name, metadata={"user": user})])

    def delete(self, name):
        self.index.delete_nodes([name], delete_from_docstore=True)
        return self.documents.pop(name)

    def hits(self):
        return sum(one.query_cache.stats().hits for one in self.wrapped.values())


class OfIndex(LlamaRetriever):
    def __init__(self, index):
        super().__init__()
        self.index, self._acl = index, [USERS[0]]

    def _retrieve(self, query_bundle):
        nodes = self.index.docstore.docs.values()
        words = set(query_bundle.query_str.split())
        found = [
            NodeWithScore(node=n, score=float(len(words & set(n.text.split()))))
            for n in nodes
            if n.metadata["user"] == self.who()
        ]
        return sorted(found, key=lambda item: -item.score)[:3]


class ByAcl(OfIndex):
    def who(self):
        return self._acl[0]

    def cache_key_parts(self):
        return self._acl, self.index


class ByNow(OfIndex):
    def who(self):
        return NOW.get()


@pytest.fixture(autouse=True)
def first_user():
    yield
    NOW.set(USERS[0])


def interleave(world, rag, steps, seed):
    """Random steps; every answer is compared with that of the bare retriever at the same moment.

    One step in thirty asks the model about what was found, in its user's namespace, reusing exact beginnings.
    """
    rng, run, user, number = random.Random(seed), Run(), USERS[0], 0
    world.switch(rng, user)
    for step in range(steps):
        chance = rng.random()
        if chance < 0.03 or len(world.documents) < 6:
            number += 1
            words = " ".join(rng.choices(WORDS, k=3))
            world.add(f"doc{number}", f"the {words} of number {number}", rng.choice(USERS))
        elif chance < 0.05:
            gone = world.delete(rng.choice(sorted(world.documents)))
            if rng.random() < 0.7:
                for namespace in ("default", *USERS):
                    rag.forget(texts=[gone], namespace=namespace)
                run.returned += [gone] if is_registered(rag, gone) else []
                run.returned += [gone] if reused(rag, gone, user) else []
        elif chance < 0.06:
            rag.forget(texts=[world.documents[rng.choice(sorted(world.documents))]])
        elif chance < 0.062:
            rag.forget()
        elif chance < 0.15:
            user = rng.choice(USERS)
            world.switch(rng, user)
        name, question = rng.choice(sorted(world.wrapped)), rng.choice(QUESTIONS)
        wanted, got = world.ask(rng, name, question, user)
        run.asked += 1
        if wanted != got:
            run.wrong.append((step, name, question, user, wanted, got))
        if step % 30 == 0:
            texts = [one if isinstance(one, str) else one[0] for one in got]
            answer = rag.generate(prompt_of(texts, question), namespace=user, policy="prefix", **ASKED)
            right = bare(rag, prompt_of(texts, question), user)
            run.generated += 1
            run.exact += answer.report.link.exact_tokens
            if answer.token_ids != right:
                run.wrong.append((step, "answer", question, user, right, answer.token_ids))
    return run


ASKED = {"max_new_tokens": 4, "do_sample": False}
BEFORE = "Answer from the context."


def prompt_of(texts, question):
    return Prompt([Text(BEFORE), *map(Chunk, texts), Text(f"\n{question}")])


def bare(rag, prompt, namespace):
    """The tokens of the model's own generate."""
    ids = rag.link(prompt, namespace=namespace, policy="full").input_ids
    output = rag.model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **ASKED)
    return tuple(output[0, ids.shape[1] :].tolist())


def reused(rag, text, namespace):
    """Whether a prompt takes more from the cache than the text before a chunk."""
    report = rag.link(prompt_of([text], "?"), namespace=namespace, policy="prefix").report
    return report.exact_tokens > rag.count_tokens(BEFORE)


def is_registered(rag, text):
    return bool(rag.components.parser.registry.find("default", text).found)


@pytest.fixture(params=[LangChainWorld, LlamaWorld], ids=["langchain", "llama-index"])
def world(request, rag):
    return request.param(rag)


def test_nobody_gets_what_a_bare_retriever_would_not_give(world, rag, caplog):
    check(world, rag, caplog, steps=700 if isinstance(world, LangChainWorld) else 350, seed=0)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("rag", ["linked", "prefix"], indirect=True)
def test_nobody_gets_what_a_bare_retriever_would_not_give_in_10000_steps(world, rag, caplog):
    check(world, rag, caplog, steps=10_000, seed=1)


def check(world, rag, caplog, steps, seed):
    run = interleave(world, rag, steps, seed)
    assert run.asked == steps
    assert run.wrong == []
    assert run.returned == []
    assert run.generated == -(-steps // 30)
    if rag.grade == "prefix":
        assert run.exact > 10 * run.generated
    figures("interleavings", world=type(world).__name__, grade=rag.grade, **vars(run))
    assert world.hits() > steps / 10, "a cache that is never hit proves nothing"
    said = [r.getMessage() for r in caplog.records if "reference PyTorch" not in r.getMessage()]
    assert len(said) == len(set(said)), "what is not cached is said once"
    assert all("pass partition=" in message for message in said)
    caplog.clear()
