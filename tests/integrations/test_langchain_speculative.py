"""SpeculativeRag: the answers of the plain chain, begun while the index is searched; nothing goes on alone."""

import asyncio
import threading
from itertools import count

import pytest
from integration_kit import PROMPT, WordEmbeddings
from langchain_core.documents import Document
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnablePassthrough

from langchain_ragcachekit import ChatRagCache, RagCacheLLM, RagCacheRetriever, SpeculativeRag, format_docs
from ragcachekit import DeadlineExceeded

QUESTIONS = ["Where was Ada Lind born?", "Which company builds boats?", "Where is Rome?"]
KEYS = {"question_key": "input"}


@pytest.fixture
def retriever(rag, documents):
    return RagCacheRetriever.from_documents(documents, WordEmbeddings(), k=2, rag=rag)


@pytest.fixture
def llm(rag):
    return ChatRagCache(rag=rag, max_tokens=6, policy="full")  # exact: caches do not change answers


def plain_answers(retriever, llm, questions=QUESTIONS):
    chain = {"context": retriever | format_docs, "input": RunnablePassthrough()} | PROMPT | llm
    return [chain.invoke(question).content for question in questions]


def speculation_of(message):
    return message.response_metadata["ragcachekit"]["speculation"]


@pytest.mark.parametrize("order", ["found", "cached"])
async def test_every_way_to_ask_gives_the_answers_of_the_plain_chain(rag, documents, llm, order):
    retriever = RagCacheRetriever.from_documents(documents, WordEmbeddings(), k=2, rag=rag, order=order)
    expected = plain_answers(retriever, llm)
    chain = SpeculativeRag(retriever, PROMPT, llm, **KEYS)
    text, searches = chain | StrOutputParser(), count(1)

    async def joined(question):
        return "".join([piece async for piece in text.astream(question)])

    async def ainvoked(question):
        return await text.ainvoke(question)

    for ask in (
        lambda: [text.invoke({"input": question}) for question in QUESTIONS],
        lambda: ["".join(text.stream(question)) for question in QUESTIONS],
        lambda: text.batch(QUESTIONS),
        lambda: asyncio.gather(*map(ainvoked, QUESTIONS)),
        lambda: asyncio.gather(*map(joined, QUESTIONS)),
    ):
        retriever.query_cache.clear()
        answers = ask()
        assert (await answers if asyncio.isfuture(answers) else answers) == expected
        assert chain.pipeline.stats.searches == next(searches) * len(QUESTIONS)
    print(chain.pipeline.stats)
    message = chain.invoke(QUESTIONS[0])
    print(speculation_of(message))
    assert message.content == expected[0]
    assert speculation_of(message)["search"] == "cached"
