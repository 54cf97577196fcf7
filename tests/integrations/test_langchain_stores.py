"""Our retriever over vector stores that people have: hits, and changes that are followed."""

import uuid

import faiss
import numpy as np
import pytest
from integration_kit import FACTS
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore

from langchain_ragcachekit import RagCacheRetriever, RagCacheVectorStore

QUESTION = "Where was Ada Lind born, who works as a baker?"
NEW = "Ada Lind was born in Bern, and Ada Lind works as a baker there."


class OwnFaiss(VectorStore):
    """A store of one's own around a Faiss index, as short as it gets."""

    def __init__(self, embedding):
        self._embedding, self._index, self._held = embedding, faiss.IndexFlatIP(embedding.width), {}

    def cache_key_parts(self):
        return ()  # its documents change through the methods of a vector store alone

    @property
    def embeddings(self):
        return self._embedding

    @classmethod
    def from_texts(cls, texts, embedding, metadatas=None, **kwargs):
        raise NotImplementedError

    def add_documents(self, documents, **kwargs):
        vectors = np.asarray(self._embedding.embed_documents([d.page_content for d in documents]), "float32")
        faiss.normalize_L2(vectors)
        names = [d.id or str(uuid.uuid4()) for d in documents]
        self._held |= {
            len(self._held) + n: (name, d) for n, (name, d) in enumerate(zip(names, documents, strict=True))
        }
        self._index.add(vectors)
        return names

    def delete(self, ids=None, **kwargs):
        self._held = {n: (None if name in ids else name, d) for n, (name, d) in self._held.items()}
        return True

    def similarity_search(self, query, k=4, **kwargs):
        vector = np.asarray([self._embedding.embed_query(query)], "float32")
        faiss.normalize_L2(vector)
        found = [self._held[int(n)] for n in self._index.search(vector, self._index.ntotal)[1][0]]
        return [d for name, d in found if name is not None][:k]


def chroma(embeddings, documents):
    from langchain_chroma import Chroma

    return Chroma.from_documents(documents, embeddings, collection_name=f"c{uuid.uuid4().hex}")


def qdrant(embeddings, documents):
    from langchain_qdrant import QdrantVectorStore

    documents = [d.model_copy(update={"id": str(uuid.uuid5(uuid.NAMESPACE_OID, d.id))}) for d in documents]
    return QdrantVectorStore.from_documents(documents, embeddings, location=":memory:", collection_name="c")


def added(store):
    def build(embeddings, documents):
        made = store(embeddings)
        made.add_documents(documents)
        return made

    return build


STORES = {
    "in memory": added(InMemoryVectorStore),
    "faiss, own class": added(OwnFaiss),
    "faiss, ours": added(RagCacheVectorStore),
    "chroma": chroma,
    "qdrant": qdrant,
}


class Events(BaseCallbackHandler):
    """The retriever's hits and misses."""

    def __init__(self):
        self.seen = []

    def on_custom_event(self, name, data, **_):
        self.seen.append(name.rpartition("_")[2])


def texts(documents):
    return [document.page_content for document in documents]


@pytest.mark.parametrize("build", STORES.values(), ids=STORES)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
async def test_a_second_question_is_a_hit_and_changes_are_followed(build, documents, embeddings):
    store = build(embeddings, [d.model_copy(update={"metadata": {"row": 1}}) for d in documents])
    expected = texts(store.similarity_search(QUESTION, k=3))
    retriever, events = RagCacheRetriever.wrap(store, k=3), Events()

    def ask():
        return retriever.invoke(QUESTION, {"callbacks": [events]})

    assert texts(ask()) == texts(ask()) == expected
    assert texts(await retriever.ainvoke(QUESTION)) == expected
    assert events.seen == ["miss", "hit"]
    assert expected[0] == FACTS[0]
    (name,) = store.add_documents([Document(NEW, id=str(uuid.UUID(int=7)), metadata={"row": 1})])
    assert NEW in texts(ask()), "a new document is found"
    assert events.seen[2:] == ["miss"]
    store.delete([name])
    assert texts(ask()) == expected, "a deleted one is not"
    assert texts(ask()) == expected
    assert events.seen[3:] == ["miss", "hit"]
    found = ask()
    found[0].metadata["row"] = 2
    assert ask()[0].metadata["row"] == 1
