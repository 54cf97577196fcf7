"""LangChain's own retrievers and chains around ours: the prompts that they make reuse chunks."""

import pytest
from integration_kit import FACTS, PROMPT, asked
from langchain_classic.chains import create_history_aware_retriever, create_retrieval_chain
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_classic.retrievers import (
    ContextualCompressionRetriever,
    EnsembleRetriever,
    MultiQueryRetriever,
    ParentDocumentRetriever,
)
from langchain_classic.retrievers.document_compressors import LLMChainExtractor
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import BaseDocumentCompressor
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.stores import InMemoryStore
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_text_splitters import RecursiveCharacterTextSplitter

from langchain_ragcachekit import DOCUMENT_PROMPT, ChatRagCache, RagCacheRetriever, format_docs
from ragcachekit import RagCache, TreeConfig
from tool_kit import scripted

QUESTION = "Where was Ada Lind born, who is a baker?"


class BestTwo(BaseDocumentCompressor):
    """A reranker: the documents in the order of their length, the first two."""

    def compress_documents(self, documents, query, callbacks=None):
        return sorted(documents, key=lambda d: len(d.page_content))[:2]


def saying(rag, text, **settings):
    """The engine's model, made to answer ``text``."""
    force = {"prefix_allowed_tokens_fn": scripted(rag.tokenizer, lambda _: text)}
    return ChatRagCache(rag=rag, max_tokens=60, generate_kwargs=force, **settings)


def around_multi_query(rag, store, embeddings):
    inner = RagCacheRetriever.wrap(store, rag=rag, k=2)
    return MultiQueryRetriever.from_llm(inner, saying(rag, "Who bakes?\nWhere was Bob born?"))


def around_ensemble(rag, store, embeddings):
    both = [RagCacheRetriever.wrap(store, rag=rag, k=k) for k in (1, 3)]
    return EnsembleRetriever(retrievers=both, weights=[0.5, 0.5])


def under_ensemble(rag, store, embeddings):
    ensemble = EnsembleRetriever(retrievers=[store.as_retriever(), store.as_retriever()], weights=[0.7, 0.3])
    return RagCacheRetriever.wrap(ensemble, embeddings=embeddings, rag=rag)


def around_compression(rag, store, embeddings):
    inner = RagCacheRetriever.wrap(store, rag=rag, k=4)
    return ContextualCompressionRetriever(base_retriever=inner, base_compressor=BestTwo())


def under_compression(rag, store, embeddings):
    extract = LLMChainExtractor.from_llm(saying(rag, "She works as a baker."))
    inner = ContextualCompressionRetriever(base_retriever=store.as_retriever(), base_compressor=extract)
    return RagCacheRetriever.wrap(
        inner, embeddings=embeddings, rag=rag, partition=lambda question, config: "one"
    )


def under_parent_documents(rag, store, embeddings):
    parents = ParentDocumentRetriever(
        vectorstore=InMemoryVectorStore(embeddings),
        docstore=InMemoryStore(),
        child_splitter=RecursiveCharacterTextSplitter(chunk_size=40, chunk_overlap=10),
    )
    parents.add_documents(store.similarity_search(QUESTION, k=6))
    return RagCacheRetriever.wrap(parents, embeddings=embeddings, rag=rag)


class Messages(BaseCallbackHandler):
    """What the chat models of a chain answered."""

    def __init__(self):
        self.all = []

    def on_llm_end(self, response, **_):
        self.all.append(response.generations[0][0].message)


@pytest.mark.parametrize(
    "build",
    [
        around_multi_query,
        around_ensemble,
        under_ensemble,
        around_compression,
        under_compression,
        under_parent_documents,
    ],
)
def test_retrievers_around_and_under_ours_reuse_chunks(rag, store, embeddings, build):
    retriever = build(rag, store, embeddings)
    model = ChatRagCache(rag=rag, max_tokens=2)
    context = retriever.invoke(QUESTION)
    answer_chain = create_stuff_documents_chain(model, PROMPT, document_prompt=DOCUMENT_PROMPT)
    _, cold = asked(answer_chain, {"context": context, "input": QUESTION})
    again = retriever.invoke(QUESTION)
    assert [d.page_content for d in again] == [d.page_content for d in context]
    _, warm = asked(answer_chain, {"context": again, "input": "And what is her work?"})
    texts = {d.page_content for d in again}
    assert len(texts) >= 1
    assert cold["input_token_details"]["cache_read"] == 0
    assert sum(rag.count_tokens(text) - 4 for text in texts) <= warm["input_token_details"]["cache_read"]
    assert warm["input_token_details"]["cache_read"] < warm["input_tokens"]


def test_a_conversation_reuses_the_chunks_and_its_turns(tiny_model, tiny_tokenizer, digests, store):
    """Context first, then the history: the second turn begins as the first one ended."""
    settings = {"policy": "lego:4", "cold": "now", "cache_dir": digests}
    with RagCache(tiny_model, tiny_tokenizer, tree=TreeConfig(turns_bytes=1 << 26), **settings) as rag:
        prompt = ChatPromptTemplate.from_messages(
            [("system", "Context:\n\n{context}"), ("placeholder", "{chat_history}"), ("human", "{input}")]
        )
        rephrase = ChatPromptTemplate.from_messages(
            [("placeholder", "{chat_history}"), ("human", "Make one question of all: {input}")]
        )
        retriever = RagCacheRetriever.wrap(store, rag=rag, k=2)
        chain = create_retrieval_chain(
            create_history_aware_retriever(saying(rag, QUESTION), retriever, rephrase),
            create_stuff_documents_chain(saying(rag, "In Bern."), prompt),
        )
        history, last = [], []
        for question in (QUESTION, "And what is her work?"):
            seen = Messages()
            result = chain.invoke({"input": question, "chat_history": history}, {"callbacks": [seen]})
            assert result["answer"] == "In Bern."
            history += [HumanMessage(question), AIMessage(result["answer"])]
            last.append(seen.all[-1].response_metadata["ragcachekit"]["link"])
        documents = sum(rag.count_tokens(document.page_content) for document in result["context"])
        turns = rag.count_tokens(f"{QUESTION}In Bern.")
        reused = [link["exact_tokens"] + link["approximate_tokens"] for link in last]
        assert reused[0] == 0
        assert reused[1] >= documents + turns


def test_format_docs_and_the_document_prompt_alter_nothing(documents):
    assert format_docs(documents[:2]) == f"{FACTS[0]}\n\n{FACTS[1]}"
    odd = documents[0].model_copy(update={"page_content": "  <b>{x}</b>\n\n&amp; \t"})
    assert format_docs([odd]) == odd.page_content
    assert DOCUMENT_PROMPT.format(page_content=odd.page_content) == odd.page_content
