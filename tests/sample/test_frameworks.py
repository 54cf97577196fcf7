"""LangChain's standard suites and ordinary chains on the sample model."""

import pytest
from langchain_classic.chains import RetrievalQA
from langchain_core.callbacks import get_usage_metadata_callback
from langchain_core.documents import Document
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests
from langchain_tests.unit_tests.chat_models import ChatModelTests
from llama_index.core import VectorStoreIndex
from llama_index.core.embeddings import BaseEmbedding
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.response_synthesizers import ResponseMode
from llama_index.core.schema import TextNode
from texts import DOCUMENTS, QUESTIONS

from langchain_ragcachekit import ChatRagCache, RagCacheRetriever
from llama_index_ragcachekit import RagCacheLLM
from llama_index_ragcachekit import RagCacheRetriever as NodeRetriever
from ragcachekit.commands.embedding import MiniLM
from small_chat_model import DETAILS, SmallChatModel

RIGHT = ("1874", "marine biology", "fifty minutes")


class OnTheSampleModel(SmallChatModel):
    @pytest.fixture(autouse=True)
    def _engine(self, engine):
        self.rag = engine


class TestUnit(OnTheSampleModel, ChatModelUnitTests):
    pass


class Answering(OnTheSampleModel):
    @property
    def chat_model_params(self):
        return {"rag": self.rag, "max_tokens": 8}

    @property
    def supported_usage_metadata_details(self):
        return {"invoke": DETAILS, "stream": DETAILS}

    def invoke_with_cache_read_input(self, *, stream=False):
        return self.read_from_cache(DOCUMENTS[0], QUESTIONS[0], stream)


@pytest.mark.soak
class TestIntegration(Answering, ChatModelIntegrationTests):
    pass


class TestPartOfIntegration(Answering, ChatModelTests):
    """All of it runs on smaller models in every run, and on this one in the soak."""

    test_astream = ChatModelIntegrationTests.test_astream
    test_stop_sequence = ChatModelIntegrationTests.test_stop_sequence
    test_usage_metadata_streaming = ChatModelIntegrationTests.test_usage_metadata_streaming


def test_retrieval_qa_reuses_what_the_first_questions_encoded(rag):
    store = InMemoryVectorStore(MiniLM())
    store.add_documents([Document(text, id=str(n)) for n, text in enumerate(DOCUMENTS)])
    inner = store.as_retriever(search_kwargs={"k": 2})
    retriever = RagCacheRetriever.wrap(inner, embeddings=MiniLM(), rag=rag)
    read, answers = [], []
    chain = RetrievalQA.from_chain_type(ChatRagCache(rag=rag, max_tokens=24), retriever=retriever)
    for question in (*QUESTIONS[:2], QUESTIONS[0]):
        with get_usage_metadata_callback() as callback:
            answers.append(chain.invoke({"query": question})["result"])
        (usage,) = callback.usage_metadata.values()
        read.append(usage["input_token_details"]["cache_read"])
    least = min(rag.count_tokens(text) for text in DOCUMENTS)
    assert read[0] == 0
    assert all(tokens >= 2 * least - 8 for tokens in read[2:])
    assert any(right in answer for right, answer in zip((*RIGHT[:2], RIGHT[0]), answers, strict=True))


class LocalEmbedding(BaseEmbedding):
    def _get_text_embedding(self, text):
        return MiniLM().embed_query(text)

    def _get_query_embedding(self, query):
        return self._get_text_embedding(query)

    async def _aget_query_embedding(self, query):
        return self._get_text_embedding(query)


def test_compact_answers_of_a_query_engine_reuse_chunks(rag):
    nodes = [TextNode(text=text, metadata={"file_name": f"{n}.txt"}) for n, text in enumerate(DOCUMENTS)]
    index = VectorStoreIndex(nodes, embed_model=LocalEmbedding())
    engine = RetrieverQueryEngine.from_args(
        NodeRetriever(index.as_retriever(similarity_top_k=2), embed_model=LocalEmbedding(), rag=rag),
        llm=RagCacheLLM(rag=rag, max_tokens=8),
        response_mode=ResponseMode.COMPACT,
    )
    first = engine.query(QUESTIONS[0])
    hits = sum(stats.hits for stats in rag.stats())
    second = engine.query(QUESTIONS[0])
    assert str(first).strip()
    assert str(second).strip()
    assert sum(stats.hits for stats in rag.stats()) >= hits + 2
