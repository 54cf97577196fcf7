"""Objects around an engine cannot be pickled, and the error says what to do instead."""

import pickle

import pytest
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.vectorstores import InMemoryVectorStore
from llama_index.core import MockEmbedding, VectorStoreIndex

import langchain_ragcachekit as langchain
import llama_index_ragcachekit as llama_index
from ragcachekit import RagCache
from speaking import byte_level, speaker


@pytest.fixture
def rag(tmp_path):
    with RagCache(speaker(), byte_level(), cache_dir=tmp_path, policy="reuse") as rag:
        yield rag


def test_langchain(rag):
    embeddings = DeterministicFakeEmbedding(size=8)
    store = InMemoryVectorStore.from_documents([Document("Berlin is the capital.")], embeddings)
    retriever = store.as_retriever()
    for holder in (
        langchain.RagCacheRetriever.wrap(retriever, embeddings=embeddings),
        langchain.RagCacheRetriever.wrap(retriever, embeddings=embeddings, rag=rag),
        langchain.ChatRagCache(rag=rag),
    ):
        with pytest.raises(TypeError, match="in each process"):
            pickle.dumps(holder)


def test_llama_index(rag):
    store = llama_index.RagCacheVectorStore()
    llm = llama_index.RagCacheLLM(rag=rag, max_tokens=3)
    for holder in (
        llm,
        store,
        llama_index.RagCachePostprocessor(rag=rag),
        llama_index.RagCacheRetriever(
            VectorStoreIndex.from_vector_store(store, MockEmbedding(4)).as_retriever(),
            embed_model=MockEmbedding(4),
        ),
    ):
        with pytest.raises(TypeError, match=r"cannot be pickled.* in each process"):
            pickle.dumps(holder)
    assert llm.model_copy(update={"max_tokens": 4}).rag is rag
