"""Chains as users write them, unchanged: the chunks are found in the prompt that the chain assembled."""

import pytest
from integration_kit import PROMPT, asked
from langchain_classic.chains import create_retrieval_chain
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.runnables import RunnablePassthrough

from langchain_ragcachekit import ChatRagCache, RagCacheRetriever

FIRST = "Where was Ada Lind born, who is a baker?"
SECOND = "What does Ada Lind work as, who was born in Bern?"


@pytest.fixture
def retriever(store, embeddings, rag):
    inner = store.as_retriever(search_kwargs={"k": 3})
    return RagCacheRetriever.wrap(inner, embeddings=embeddings, rag=rag, tolerance=0.05)


def shared_tokens(rag, first, second, recomputed=4):
    """Tokens of the chunks in both contexts, less those that the policy recomputes."""
    texts = {document.page_content for document in first}
    return sum(rag.count_tokens(d.page_content) - recomputed for d in second if d.page_content in texts)


def test_stuff_documents_and_retrieval_chain_reuse_on_the_second_question(retriever, rag):
    documents_chain = create_stuff_documents_chain(ChatRagCache(rag=rag, max_tokens=6), PROMPT)
    chain = create_retrieval_chain(retriever, documents_chain)
    first, cold = asked(chain, {"input": FIRST})
    second, warm = asked(chain, {"input": SECOND})
    assert cold["input_token_details"]["cache_read"] == 0
    shared = shared_tokens(rag, first["context"], second["context"])
    assert shared > 0
    assert warm["input_token_details"]["cache_read"] >= shared
    assert warm["input_token_details"]["cache_read"] < warm["input_tokens"]
    assert isinstance(second["answer"], str)


def test_the_report_says_that_the_chain_altered_the_chunks(retriever, rag):
    inputs = {"context": retriever | _joined | str.lower, "input": RunnablePassthrough()}
    message = (inputs | PROMPT | ChatRagCache(rag=rag, max_tokens=2)).invoke(FIRST)
    (note,) = message.response_metadata["ragcachekit"]["link"]["notes"]
    assert note.startswith("no chunk registered in namespace 'default' occurs verbatim in the prompt")
    plain = {"context": retriever | _joined, "input": RunnablePassthrough()}
    message = (plain | PROMPT | ChatRagCache(rag=rag, max_tokens=2)).invoke(FIRST)
    assert message.response_metadata["ragcachekit"]["link"]["notes"] == ()


def _joined(documents):
    return "\n\n".join(document.page_content for document in documents)
