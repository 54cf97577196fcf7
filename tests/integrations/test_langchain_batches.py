"""LangChain's batches: decoded together, as alone, and ended by Ctrl-C and cancelled tasks."""

import asyncio

import pytest
from integration_kit import FACTS
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda, RunnableParallel, RunnablePassthrough

from langchain_ragcachekit import ChatRagCache, RagCacheLLM
from layer_kit import interrupts, threads_ended, watched
from ragcachekit import CancelScope, QueueConfig, QueueFull, RagCache
from soak_kit import soaked
from speaking import byte_level, speaker

LAYERS = 8
QUESTIONS = [f"{fact} Question {number}?" for number, fact in enumerate((*FACTS, *FACTS[:2]))]
TEMPLATE = ChatPromptTemplate.from_messages([("system", "Answer from the context."), ("human", "{question}")])
BATCHED = [{"question": question} for question in QUESTIONS]
TOKENS = 10


def chat_of(rag):
    return ChatRagCache(rag=rag, max_tokens=TOKENS)


def plain(rag):
    return RagCacheLLM(rag=rag, max_tokens=TOKENS)


def chain_of(rag):
    return TEMPLATE | chat_of(rag) | StrOutputParser()


def texts(messages):
    return [message.content for message in messages]


TOGETHER = {
    "chat.batch": lambda rag: texts(chat_of(rag).batch(QUESTIONS)),
    "chat.batch_as_completed": lambda rag: texts(
        message for _, message in sorted(chat_of(rag).batch_as_completed(QUESTIONS))
    ),
    "chain.batch": lambda rag: chain_of(rag).batch(BATCHED),
    "chain.abatch": lambda rag: asyncio.run(chain_of(rag).abatch(BATCHED)),
    "llm.batch": lambda rag: plain(rag).batch(QUESTIONS),
    "llm.agenerate": lambda rag: [
        g[0].text for g in asyncio.run(plain(rag).agenerate(QUESTIONS)).generations
    ],
}
ALONE = {
    "chat": lambda rag: texts([chat_of(rag).invoke(question) for question in QUESTIONS]),
    "chain": lambda rag: [chain_of(rag).invoke(question) for question in BATCHED],
    "llm": lambda rag: [plain(rag).invoke(question) for question in QUESTIONS],
}


@pytest.mark.parametrize("call", soaked(TOGETHER, *list(TOGETHER)[1::2]))
def test_a_batch_is_decoded_together_and_answers_as_alone(rag, call):
    expected = ALONE[call.partition(".")[0]](rag)
    before = rag.queue.stats()
    assert TOGETHER[call](rag) == expected
    after = rag.queue.stats()
    assert after.submitted - before.submitted == len(QUESTIONS)
    assert 0 < after.steps - before.steps < len(QUESTIONS) * (TOKENS - 1) / 2, "two or more per step"


def test_batches_wait_for_room_and_say_when_told_not_to(tiny_model, tiny_tokenizer, digests):
    tight = QueueConfig(max_batch=1, max_waiting=1)
    with RagCache(tiny_model, tiny_tokenizer, policy="full", queue=tight, cache_dir=digests) as rag:
        assert len(chat_of(rag).batch(QUESTIONS)) == len(QUESTIONS)
        impatient = ChatRagCache(rag=rag, max_tokens=TOKENS, generate_kwargs={"wait": False})
        results = impatient.batch(QUESTIONS, return_exceptions=True)
        refused = [result for result in results if isinstance(result, QueueFull)]
        assert 0 < len(refused) < len(QUESTIONS)


@pytest.fixture(scope="module")
def model():
    return speaker(num_hidden_layers=LAYERS, max_position_embeddings=1024)


@pytest.fixture
def layered(model, digests):
    with RagCache(model, byte_level(), policy="lego:4", cold="never", cache_dir=digests) as rag:
        yield rag
    assert threads_ended()


@pytest.fixture
def chat(layered):
    return ChatRagCache(rag=layered, max_tokens=1)


@pytest.fixture
def interrupt(monkeypatch):
    with interrupts(monkeypatch) as interrupt:
        yield interrupt


BATCHES = {
    "chat": lambda chat, **options: chat.batch(QUESTIONS, **options),
    "chain": lambda chat, **options: (TEMPLATE | chat | StrOutputParser()).batch(BATCHED, **options),
    "fallbacks": lambda chat, **options: chat.with_fallbacks([chat]).batch(QUESTIONS, **options),
    "exceptions returned": lambda chat, **o: chat.batch(QUESTIONS, return_exceptions=True, **o),
}


LIMITED = [*((batch, None) for batch in BATCHES), ("chat", 2)]


@pytest.mark.parametrize(("batch", "limit"), soaked(LIMITED, *LIMITED[::2], LIMITED[-1]))
def test_an_interrupt_ends_a_batch(chat, model, interrupt, batch, limit):
    with watched(model, 3, interrupt) as layers, pytest.raises(KeyboardInterrupt):
        BATCHES[batch](chat, config={"max_concurrency": limit})
    assert layers.most_after <= 1
    assert layers.begun < len(QUESTIONS) * LAYERS
    assert texts(chat.batch(QUESTIONS)) == texts(map(chat.invoke, QUESTIONS))


@pytest.mark.parametrize("chain", ["parallel", "assign"])
def test_a_chain_with_threads_of_its_own_ends_in_a_scope(chat, model, interrupt, chain):
    answer = RunnableLambda(lambda given: given["question"]) | chat
    if chain == "parallel":
        whole = RunnableParallel(one=answer, two=answer)
    else:
        whole = RunnablePassthrough.assign(answer=answer)
    with watched(model, 3, interrupt) as layers, pytest.raises(KeyboardInterrupt):
        CancelScope().run(whole.invoke, BATCHED[0])
    assert layers.most_after <= 1
