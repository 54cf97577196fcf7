"""langchain-tests' standard suite for retrievers, over a vector store and over its retriever."""

from integration_kit import FACTS, WordEmbeddings
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_tests.integration_tests import RetrieversIntegrationTests

from langchain_ragcachekit import RagCacheRetriever


class TestOverVectorStore(RetrieversIntegrationTests):
    @property
    def retriever_constructor(self):
        return RagCacheRetriever

    @property
    def retriever_constructor_params(self):
        return {"retriever": InMemoryVectorStore.from_texts(list(FACTS), WordEmbeddings())}

    @property
    def retriever_query_example(self):
        return "Where was Ada Lind born?"


class TestOverItsRetrieverWithTolerance(TestOverVectorStore):
    @property
    def retriever_constructor_params(self):
        embeddings = WordEmbeddings()
        store = InMemoryVectorStore.from_texts(list(FACTS), embeddings)
        inner = store.as_retriever(search_kwargs={"k": 2})
        return {"retriever": inner, "embeddings": embeddings, "tolerance": 0.1}
