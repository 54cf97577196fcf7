"""``path=`` on the retrievers: a second process answers the first one's questions without a search."""

import json
import os
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import faiss
import pytest
from integration_kit import FACTS, WordEmbeddings
from langchain_chroma import Chroma
from langchain_core.documents import Document
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_qdrant import QdrantVectorStore
from llama_index.core import StorageContext, VectorStoreIndex
from llama_index.core.schema import TextNode
from llama_index.vector_stores.faiss import FaissVectorStore
from llama_kit import Embedder
from qdrant_client import QdrantClient
from qdrant_client.models import Distance, VectorParams

from langchain_ragcachekit import RagCacheRetriever, RagCacheVectorStore
from llama_index_ragcachekit import RagCacheRetriever as LlamaRetriever
from ragcachekit.json_store import JsonStore
from ragcachekit.retrieval.stores import state_of

QUESTION = "Where was Ada Lind born?"
DOCUMENTS = [Document(text, id=f"{n:032x}", metadata={"row": n}) for n, text in enumerate(FACTS)]
NODES = [TextNode(text=text, id_=str(n)) for n, text in enumerate(FACTS)]


def chroma(folder):
    store = Chroma("facts", WordEmbeddings(), persist_directory=str(folder / "chroma"))
    if not store.get()["ids"]:
        store.add_documents(DOCUMENTS)
    return RagCacheRetriever.wrap(store, k=2, path=folder / "questions", tolerance=1.5, guard=False)


def qdrant(folder):
    client = QdrantClient(path=str(folder / "qdrant"))
    if not client.collection_exists("facts"):
        client.create_collection("facts", vectors_config=VectorParams(size=64, distance=Distance.COSINE))
    store = QdrantVectorStore(client, "facts", WordEmbeddings())
    if not client.count("facts").count:
        store.add_documents(DOCUMENTS)
    return RagCacheRetriever.wrap(store, k=2, path=folder / "questions")


def own(folder):
    return RagCacheRetriever.from_documents(DOCUMENTS, WordEmbeddings(), path=folder / "index", k=2)


def llama_own(folder):
    return LlamaRetriever.from_nodes(NODES, Embedder(asked=[]), path=folder / "index", k=2)


KINDS = {one.__name__: one for one in (chroma, qdrant, own, llama_own)}


def texts(retriever, question=QUESTION):
    if isinstance(retriever, LlamaRetriever):
        return [(one.node_id, one.text, one.score) for one in retriever.retrieve(question)]
    return [(one.id, one.page_content, one.metadata) for one in retriever.invoke(question)]


def asked_elsewhere(folder, *questions):
    """Per kind, what a process of its own finds, and how many of the questions it did not search for."""
    code = "import json, sys, test_saved_questions as t; print(json.dumps(t.found_by_all(*sys.argv[1:])))"
    here = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    ran = subprocess.run(
        [sys.executable, "-c", code, str(folder), *questions],
        env={**os.environ, "PYTHONPATH": here},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(ran.stdout.splitlines()[-1])


def found_by_all(folder, *questions):
    out = {}
    for kind, make in KINDS.items():
        retriever = make(Path(folder) / kind)
        found = [texts(retriever, question) for question in questions]
        out[kind] = found, retriever.query_cache.stats().hits
        if kind == "qdrant":  # whose folder one process has at a time
            retriever.vectorstore.client.close()
    return json.loads(json.dumps(out))


@pytest.mark.parametrize("asked_again", [found_by_all, pytest.param(asked_elsewhere, marks=pytest.mark.soak)])
def test_retrievers_made_anew_find_the_same_without_a_search(tmp_path, asked_again):
    first = found_by_all(tmp_path, QUESTION)
    again = asked_again(tmp_path, QUESTION, "Where is the harbour frozen?")
    for kind in KINDS:
        (found,), hits = first[kind]
        assert (len(found), hits) == (2, 0), kind
        (same, _), hits = again[kind]
        assert (same, hits) == (found, 1), kind


def test_an_index_in_memory_and_other_databases_keep_to_themselves(tmp_path):
    store = RagCacheVectorStore.from_documents(DOCUMENTS, WordEmbeddings())
    retriever = RagCacheRetriever.wrap(store, k=2, path=tmp_path / "questions", version=lambda: 1)
    texts(retriever)
    store.add_documents([Document(QUESTION)])
    assert texts(retriever)[0][1] == QUESTION
    one, other = (qdrant(tmp_path / name).vectorstore for name in ("one", "other"))
    assert state_of(one) != state_of(other)
    assert state_of(one)[1:] == state_of(other)[1:]


def restarted(folder, documents=DOCUMENTS, version=lambda: 1, **settings):
    """A retriever as a new process makes it, over a store in memory, which has neither count nor version."""
    store = InMemoryVectorStore(WordEmbeddings())
    store.add_documents(documents)
    return RagCacheRetriever.wrap(store, k=2, path=folder / "questions", version=version, **settings)


def is_hit(retriever, question=QUESTION):
    before = retriever.query_cache.stats().hits
    texts(retriever, question)
    return retriever.query_cache.stats().hits > before


def saved_texts(folder):
    with JsonStore(folder / "questions") as store:
        values = map(store.get, store.keys("query:"))
        return [one["text"] for value in values for _, one in value["documents"]]


def test_another_count_or_another_search_finds_nothing_of_before(tmp_path):
    assert not is_hit(restarted(tmp_path))
    assert not is_hit(restarted(tmp_path, namespace="other"))
    assert not is_hit(restarted(tmp_path, partition=lambda *_: "ann"))
    assert [is_hit(restarted(tmp_path)), is_hit(restarted(tmp_path, partition=lambda *_: "ann"))] == [
        True
    ] * 2
    retriever = chroma(tmp_path)
    assert not is_hit(retriever)
    retriever.vectorstore._collection.add(ids=["z"], embeddings=[[0.0] * 64], documents=["unseen"])
    assert not is_hit(chroma(tmp_path))
    assert is_hit(chroma(tmp_path))
    assert is_hit(chroma(tmp_path), "Where was Ada Lind born, please?"), "near ones hit as before"


def test_a_change_that_keeps_the_count_erases_what_was_saved(tmp_path):
    first = chroma(tmp_path)
    (name, *_), *_ = texts(first)
    first.vectorstore.update_document(
        name, Document("Ada Lind was born in Chur, as of today.", metadata={"row": 0})
    )
    assert "Chur" in texts(chroma(tmp_path))[0][1]
    chroma(tmp_path).vectorstore.update_document(name, DOCUMENTS[int(name, 16)])  # before any question
    assert "Chur" not in texts(chroma(tmp_path))[0][1]


@pytest.mark.parametrize("asked", [True, False])
def test_forgotten_texts_are_gone_from_the_files_of_all_processes(tmp_path, asked):
    (_, text, _), *_ = texts(restarted(tmp_path))
    texts(restarted(tmp_path, namespace="other"), "Where is the harbour frozen?")
    assert text in saved_texts(tmp_path)
    later = restarted(tmp_path)
    if asked:
        assert is_hit(later)
    later.query_cache.forget_texts("default", lambda one: one == text)
    assert text not in saved_texts(tmp_path)
    assert not is_hit(restarted(tmp_path))
    assert is_hit(restarted(tmp_path, namespace="other"), "Where is the harbour frozen?")
    restarted(tmp_path).query_cache.clear()
    assert saved_texts(tmp_path) == []


def test_a_store_without_a_count_needs_a_ttl_or_a_version(tmp_path, caplog, monkeypatch):
    def asked(documents=DOCUMENTS, version=None, **settings):
        return is_hit(restarted(tmp_path, documents, version, **settings))

    assert [asked(), asked()] == [False, False]
    assert "not kept for the next process" in caplog.text
    assert "pass ttl= or version=" in caplog.text
    assert [asked(ttl=60), asked(ttl=60)] == [False, True]
    assert [asked(version=lambda: 1), asked(version=lambda: 2), asked(version=lambda: 1)] == [
        False,
        False,
        True,
    ]
    now = time.time() + 61
    monkeypatch.setattr("time.time", lambda: now)
    assert not asked(ttl=60)
    no_json = [Document("a", metadata={"at": (1, 2)})]
    assert [asked(no_json, version=lambda: 3), asked(no_json, version=lambda: 3)] == [False, False]


@pytest.mark.parametrize("damage", ["a byte", "the file", "another program's"])
def test_damage_means_an_empty_cache(tmp_path, damage):
    folder = tmp_path / "questions"
    if damage == "another program's":
        with JsonStore(folder) as store:
            store.put({"head": 1, "query:x:y": {"documents": 3}})
    else:
        texts(restarted(tmp_path))
        database = folder / "cache.db"
        sqlite3.connect(database).execute("PRAGMA wal_checkpoint(TRUNCATE)")  # all is in the one file now
        raw = bytearray(database.read_bytes())
        at = raw.index(b"Ada Lind was")
        raw[at : at + 3] = b"Bob"
        database.write_bytes(raw if damage == "a byte" else b"x" * 4096)
        for file in folder.glob("cache.db-*"):
            file.unlink()
    found = texts(restarted(tmp_path))
    assert found == [(one.id, one.page_content, one.metadata) for one in (DOCUMENTS[0], DOCUMENTS[4])]
    assert is_hit(restarted(tmp_path))
    if damage == "another program's":
        restarted(tmp_path).query_cache.clear()
        with JsonStore(folder) as store:
            assert store.keys() == ["head"]


def in_qdrant(distance):
    client = QdrantClient(":memory:")
    client.create_collection("facts", vectors_config={"v": VectorParams(size=64, distance=distance)})
    return QdrantVectorStore(client, "facts", WordEmbeddings(), vector_name="v", distance=distance)


def in_chroma(space):
    settings = None if space is None else {"hnsw": {"space": space}}
    return Chroma(f"of-{space}", WordEmbeddings(), collection_configuration=settings)


def in_llama_index(kind):
    store = None if kind is None else FaissVectorStore(kind(64))
    context = StorageContext.from_defaults(vector_store=store)
    return VectorStoreIndex(NODES, storage_context=context, embed_model=Embedder(asked=[])).as_retriever()


def saying(strategy):
    kind = type("Store", (InMemoryVectorStore,), {"distance_strategy": strategy})
    return kind(WordEmbeddings())


METRICS = {
    "named": (saying, [("EUCLIDEAN_DISTANCE", "l2"), ("MAX_INNER_PRODUCT", "ip"), ("JACCARD", "cosine")]),
    "chroma": (in_chroma, [(None, "l2"), ("cosine", "cosine"), ("ip", "ip")]),
    "qdrant": (in_qdrant, [(Distance.COSINE, "cosine"), (Distance.DOT, "ip"), (Distance.EUCLID, "l2")]),
    "llama": (in_llama_index, [(faiss.IndexFlatL2, "l2"), (faiss.IndexFlatIP, "ip"), (None, "cosine")]),
}


@pytest.mark.parametrize("kind", METRICS)
def test_the_metric_is_that_of_the_store(kind):
    make, expected = METRICS[kind]
    for setting, metric in expected:
        store = make(setting)
        if kind == "llama":
            retriever = LlamaRetriever(store, embed_model=Embedder(asked=[]))
        else:
            retriever = RagCacheRetriever.wrap(store)
        assert retriever.query_cache.metric == metric


def test_an_unknown_metric_is_said_once(caplog):
    store = in_qdrant(Distance.MANHATTAN)
    store.add_documents(DOCUMENTS)
    retriever = RagCacheRetriever.wrap(store, tolerance=0.1)
    assert is_hit(retriever) < is_hit(retriever)
    assert [one.message for one in caplog.records if "metric" in one.message] == [
        "the metric of the wrapped store is not known: questions are compared by cosine; pass metric="
    ]
    RagCacheRetriever.wrap(store, tolerance=0.1, metric="cosine")
    RagCacheRetriever.wrap(store)  # equal questions only
    assert len(caplog.records) == 1
