"""LangChain's standard suites and ordinary chains on the sample model."""

import pytest
from langchain_classic.chains import RetrievalQA
from langchain_core.callbacks import get_usage_metadata_callback
from langchain_core.documents import Document
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_tests.integration_tests import ChatModelIntegrationTests
from texts import DOCUMENTS, QUESTIONS

from langchain_ragcachekit import ChatRagCache, RagCacheRetriever
from ragcachekit.commands.embedding import MiniLM
from small_chat_model import DETAILS, SmallChatModel

RIGHT = "1874"


@pytest.mark.soak
class TestIntegration(SmallChatModel, ChatModelIntegrationTests):
    """On smaller models it runs in every run."""

    @pytest.fixture(autouse=True)
    def _engine(self, engine):
        self.rag = engine

    @property
    def chat_model_params(self):
        return {"rag": self.rag, "max_tokens": 8}

    @property
    def supported_usage_metadata_details(self):
        return {"invoke": DETAILS, "stream": DETAILS}

    def invoke_with_cache_read_input(self, *, stream=False):
        return self.read_from_cache(DOCUMENTS[0], QUESTIONS[0], stream)


@pytest.mark.soak
def test_retrieval_qa_reuses_what_the_first_questions_encoded(rag):
    store = InMemoryVectorStore(MiniLM())
    store.add_documents([Document(text, id=str(n)) for n, text in enumerate(DOCUMENTS)])
    inner = store.as_retriever(search_kwargs={"k": 2})
    retriever = RagCacheRetriever.wrap(inner, embeddings=MiniLM(), rag=rag)
    read, answers = [], []
    chain = RetrievalQA.from_chain_type(ChatRagCache(rag=rag, max_tokens=24), retriever=retriever)
    for question in (QUESTIONS[0], QUESTIONS[0]):
        with get_usage_metadata_callback() as callback:
            answers.append(chain.invoke({"query": question})["result"])
        (usage,) = callback.usage_metadata.values()
        read.append(usage["input_token_details"]["cache_read"])
    least = min(rag.count_tokens(text) for text in DOCUMENTS)
    assert read[0] == 0
    assert all(tokens >= 2 * least - 8 for tokens in read[1:])
    assert any(RIGHT in answer for answer in answers)
