"""The embedded vector store: langchain-tests' standard suite over every index, and what it keeps."""

import pytest
from integration_kit import FACTS, WordEmbeddings
from langchain_core.documents import Document
from langchain_tests.integration_tests import VectorStoreIntegrationTests

from langchain_ragcachekit import RagCacheVectorStore


class TestStandard(VectorStoreIntegrationTests):
    @pytest.fixture(params=["faiss-flat", "faiss-hnsw", "folder"])
    def vectorstore(self, request, tmp_path):
        kind, path = request.param, None
        if kind == "folder":
            kind, path = "faiss-flat", tmp_path
        store = RagCacheVectorStore(self.get_embeddings(), index=kind, path=path)
        yield store
        store.close()


def facts(source="facts"):
    return [Document(text, metadata={"source": source, "at": at}) for at, text in enumerate(FACTS)]


def test_it_is_there_after_a_restart_and_nothing_is_embedded_again(tmp_path):
    embeddings = WordEmbeddings()
    store = RagCacheVectorStore(embeddings, path=tmp_path)
    ids = store.add_documents(facts())
    found = store.similarity_search_with_score("Where was Ada Lind born?", k=2)
    store.close()
    again = RagCacheVectorStore(embeddings, path=tmp_path)
    embeddings.embed_documents = None
    assert again.add_documents(facts()) == ids
    assert again.similarity_search_with_score("Where was Ada Lind born?", k=2) == found
    assert found[0][0].metadata == {"source": "facts", "at": 0}
    assert [document.id for document in again.get_by_ids(ids[2:4])] == ids[2:4]


def test_filters():
    store = RagCacheVectorStore(WordEmbeddings())
    store.add_documents([*facts("old"), *facts("new")])
    asked = "Where was Ada Lind born?"
    old = store.similarity_search(asked, k=6, filter={"source": "old"})
    assert [document.metadata["source"] for document in old] == ["old"] * 6
    few = store.similarity_search(asked, k=6, filter=lambda document: document.metadata["at"] == 3)
    assert [document.page_content for document in few] == [FACTS[3]] * 2
    assert store.delete() is True
    assert store.similarity_search(asked) == []
    assert store.delete(["unknown"]) is False


def test_wrong_input_changes_nothing():
    store = RagCacheVectorStore(WordEmbeddings())
    with pytest.raises(ValueError, match="1 ids for 6 documents"):
        store.add_documents(facts(), ids=["a"])
    with pytest.raises(TypeError, match="metadata"):
        store.add_documents([Document("text", metadata={"when": object()})])
    assert len(store.index) == 0
