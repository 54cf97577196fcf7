"""No stale result: random adds, updates, deletes and forgets between questions, against a list of documents.

Every thread owns some documents and asks about these: what it has changed, it must see at once, whatever
the others do.
"""

import random
import threading
import time

import numpy as np
import pytest
from fake_engine import FakeEngine
from integration_kit import WordEmbeddings
from langchain_core.documents import Document
from langchain_core.vectorstores import InMemoryVectorStore
from llama_index.core import Document as LlamaDocument
from llama_index.core import VectorStoreIndex
from llama_index.core.retrievers import VectorIndexRetriever
from llama_kit import Embedder

from langchain_ragcachekit import RagCacheRetriever
from llama_index_ragcachekit import RagCacheRetriever as LlamaRetriever
from soak_kit import soaked

THREADS, K = 4, 3
WORDS = [f"word{number}" for number in range(40)]


class ForgettingEngine(FakeEngine):
    """Forgets as RagCache does: in every query cache of its retrievers."""

    def forget(self, texts):
        for cache in self.query_caches:
            cache.forget_texts("default", lambda text: text in texts)


class LangChainOwn:
    def __init__(self, engine, tolerance, path):
        own = {"path": path, "k": K, "rag": engine, "tolerance": tolerance, "guard": False}
        self.retriever = RagCacheRetriever.from_documents([], WordEmbeddings(), **own)
        self.store = self.retriever.vectorstore

    def put(self, name, text):
        self.store.add_documents([Document(text, id=name)])

    def remove(self, name):
        self.store.delete([name])

    def ask(self, question):
        return [(found.id, found.page_content) for found in self.retriever.invoke(question)]


class LangChainWrapped(LangChainOwn):
    def __init__(self, engine, tolerance, path, **settings):
        self.store = InMemoryVectorStore(WordEmbeddings())
        inner = self.store.as_retriever(search_kwargs={"k": K})
        self.retriever = RagCacheRetriever.wrap(
            inner, rag=engine, tolerance=tolerance, guard=False, **settings
        )


class LlamaOwn:
    def __init__(self, engine, tolerance, path):
        own = {"path": path, "k": K, "rag": engine, "tolerance": tolerance, "guard": False}
        self.retriever = LlamaRetriever.from_nodes([], Embedder(asked=[]), **own)
        self.index = self.retriever.index

    def put(self, name, text):
        self.remove(name)
        self.index.insert(LlamaDocument(text=text, id_=name))

    def remove(self, name):
        self.index.delete_ref_doc(name, delete_from_docstore=True)

    def ask(self, question):
        return [(one.node.ref_doc_id, one.node.get_content()) for one in self.retriever.retrieve(question)]


class LlamaWrapped(LlamaOwn):
    def __init__(self, engine, tolerance, path, **settings):
        model = Embedder(asked=[])
        self.index = VectorStoreIndex([], embed_model=model)
        inner = VectorIndexRetriever(self.index, similarity_top_k=K)  # as_retriever fixes the nodes of now
        self.retriever = LlamaRetriever(
            inner, embed_model=model, rag=engine, tolerance=tolerance, guard=False, **settings
        )


KINDS = {
    **{"own": LangChainOwn, "wrapped": LangChainWrapped},
    **{"llama-own": LlamaOwn, "llama-wrapped": LlamaWrapped},
}


def text_of(rng, owner):
    return " ".join([f"owner{owner}", *rng.sample(WORDS, 5)])


def nearest(documents, question):
    """The K nearest of the owner's documents by cosine; ties are cut away with those that tie at the end."""
    embed = WordEmbeddings().embed_query
    query = np.array(embed(question))
    scores = {
        name: float(np.array(embed(text)) @ query / np.linalg.norm(embed(text)) / np.linalg.norm(query))
        for name, text in documents.items()
    }
    return sorted(scores.values(), reverse=True)[:K], scores


def live(world, engine, owner, steps, seed, alone):
    """Random steps of one owner; asserts after each question."""
    rng = random.Random(seed)
    documents, questions = {}, [text_of(rng, owner) for _ in range(8)]
    for step in range(steps):
        kind = rng.choices(("put", "update", "remove", "forget", "ask"), (2, 1, 1, 1, 6))[0]
        if kind == "put" or not documents:
            name = f"{owner}-{step}"
            documents[name] = text_of(rng, owner)
            world.put(name, documents[name])
        elif kind == "update":
            name = rng.choice(sorted(documents))
            documents[name] = text_of(rng, owner)
            world.put(name, documents[name])
        elif kind in ("remove", "forget"):
            name = rng.choice(sorted(documents))
            world.remove(name)
            if kind == "forget":
                engine.forget([documents[name]])
            del documents[name]
        else:
            question = rng.choice(questions)
            found = world.ask(question)
            mine = [(name, text) for name, text in found if name.startswith(f"{owner}-")]
            assert set(mine) <= set(documents.items()), "a document that is gone, or its old text"
            if alone:
                best, scores = nearest(documents, question)
                got = sorted((scores[name] for name, _ in found), reverse=True)
                assert got == pytest.approx(best), "a nearer document is missing"


@pytest.mark.parametrize(
    ("kind", "saved"), [*((kind, False) for kind in KINDS), ("own", True), ("llama-own", True)]
)
def test_every_change_is_seen_by_the_next_question(kind, saved, tmp_path):
    engine = ForgettingEngine()
    world = KINDS[kind](engine, 0.0, tmp_path / "index" if saved else None)
    live(world, engine, 0, 300, seed=kind, alone=True)
    assert world.retriever.query_cache.stats().hits > 20


@pytest.mark.parametrize("kind", ["wrapped", "llama-wrapped"])
def test_popular_results_slide_under_max_idle_and_end_with_ttl(kind, monkeypatch):
    now = [1e9]
    monkeypatch.setattr(time, "time", lambda: now[0])
    worlds = [KINDS[kind](FakeEngine(), 0.0, None, max_idle=10.0, **limits) for limits in ({}, {"ttl": 25.0})]
    for world in worlds:
        world.put("0-0", "word1")
    hits = []
    for _ in range(6):
        for world in worlds:
            world.ask("word1")
        hits.append([world.retriever.query_cache.stats().hits for world in worlds])
        now[0] += 7
    assert hits == [[0, 0], [1, 1], [2, 2], [3, 3], [4, 3], [5, 4]], "the second was searched again"


@pytest.mark.parametrize("kind", soaked(KINDS, "own", "llama-wrapped"))
def test_with_a_tolerance_nothing_that_is_gone_comes_back(kind, tmp_path):
    engine = ForgettingEngine()
    world = KINDS[kind](engine, 0.5, None)
    live(world, engine, 0, 500, seed=kind, alone=False)
    assert world.retriever.query_cache.stats().hits > 50


@pytest.mark.parametrize("kind", soaked(["own", "wrapped", "llama-own"], "wrapped", "llama-own"))
def test_threads_see_their_own_changes_at_once(kind):
    engine = ForgettingEngine()
    world, failures = KINDS[kind](engine, 0.2, None), []

    def run(owner):
        try:
            live(world, engine, owner, 120, seed=f"{kind} {owner}", alone=False)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(owner,)) for owner in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert failures == []
