"""Several prompts at once through LangChain and LlamaIndex are decoded together, as one at a time."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from fake_engine import FakeEngine
from integration_kit import FACTS
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from llama_index.core import PromptTemplate
from llama_index.core.llms import ChatMessage

from langchain_ragcachekit import ChatRagCache, RagCacheLLM
from langchain_ragcachekit.settings import MAX_THREADS, together
from layer_kit import interrupts, watched
from llama_index_ragcachekit import RagCacheLLM as LlamaIndexLLM
from ragcachekit import QueueConfig, QueueFull, RagCache

QUESTIONS = [f"{fact} Question {number}?" for number, fact in enumerate((*FACTS, *FACTS[:2]))]
TEMPLATE = ChatPromptTemplate.from_messages([("system", "Answer from the context."), ("human", "{question}")])
BATCHED = [{"question": question} for question in QUESTIONS]
TOKENS = 24


def chat_of(rag):
    return ChatRagCache(cache=rag, max_tokens=TOKENS)


def completions(rag):
    return RagCacheLLM(cache=rag, max_tokens=TOKENS)


def chain_of(rag):
    return TEMPLATE | chat_of(rag) | StrOutputParser()


def llama_index(rag):
    return LlamaIndexLLM(cache=rag, max_tokens=TOKENS)


async def gathered(make, questions):
    return await asyncio.gather(*map(make, questions))


def in_threads(work):
    with ThreadPoolExecutor(len(QUESTIONS)) as pool:
        return list(pool.map(work, QUESTIONS))


def texts(messages):
    return [message.content for message in messages]


BATCHES = {
    "chat.batch": lambda rag: texts(chat_of(rag).batch(QUESTIONS)),
    "chain.batch": lambda rag: chain_of(rag).batch(BATCHED),
    "chain.abatch": lambda rag: asyncio.run(chain_of(rag).abatch(BATCHED)),
    "chat.batch_as_completed": lambda rag: [
        message.content for _, message in sorted(chat_of(rag).batch_as_completed(QUESTIONS))
    ],
    "llm.batch": lambda rag: completions(rag).batch(QUESTIONS),
    "llm.generate": lambda rag: [g[0].text for g in completions(rag).generate(QUESTIONS).generations],
    "llm.agenerate": lambda rag: [
        g[0].text for g in asyncio.run(completions(rag).agenerate(QUESTIONS)).generations
    ],
    "acomplete": lambda rag: [r.text for r in asyncio.run(gathered(llama_index(rag).acomplete, QUESTIONS))],
    "apredict": lambda rag: asyncio.run(
        gathered(lambda q: llama_index(rag).apredict(PromptTemplate("{q}"), q=q), QUESTIONS)
    ),
    "stream_complete": lambda rag: in_threads(
        lambda question: [*llama_index(rag).stream_complete(question)][-1].text
    ),
    "llm.stream": lambda rag: in_threads(lambda question: "".join(completions(rag).stream(question))),
}
ALONE = {
    "stream": lambda rag: [llama_index(rag).complete(question).text for question in QUESTIONS],
    "chat": lambda rag: texts([chat_of(rag).invoke(question) for question in QUESTIONS]),
    "chain": lambda rag: [chain_of(rag).invoke(question) for question in BATCHED],
    "llm": lambda rag: [completions(rag).invoke(question) for question in QUESTIONS],
    "acomplete": lambda rag: [llama_index(rag).complete(question).text for question in QUESTIONS],
    "apredict": lambda rag: [
        llama_index(rag).predict(PromptTemplate("{q}"), q=question) for question in QUESTIONS
    ],
}


@pytest.mark.parametrize("call", BATCHES)
def test_a_batch_is_decoded_together_and_answers_as_alone(rag, call):
    name = next(name for name in ALONE if call.startswith(name))
    expected = ALONE[name](rag)
    before = rag.queue.stats()
    assert BATCHES[call](rag) == expected
    after = rag.queue.stats()
    assert after.submitted - before.submitted == len(QUESTIONS)
    assert 0 < after.steps - before.steps < len(QUESTIONS) * (TOKENS - 1) / 2, "two or more per step"


def test_sync_calls_wait_for_room_and_say_when_told_not_to(tiny_model, tiny_tokenizer, digests):
    tight = QueueConfig(max_batch=1, max_waiting=1)
    with RagCache(tiny_model, tiny_tokenizer, policy="full", queue=tight, cache_dir=digests) as rag:
        assert len(chat_of(rag).batch(QUESTIONS)) == len(QUESTIONS)
        impatient = ChatRagCache(cache=rag, max_tokens=TOKENS, generate_kwargs={"wait": False})
        results = impatient.batch(QUESTIONS, return_exceptions=True)
        refused = [result for result in results if isinstance(result, QueueFull)]
        assert refused
        assert len(refused) < len(QUESTIONS)


def test_every_call_takes_wait(rag):
    models = [
        kind(cache=rag, max_tokens=2, generate_kwargs={"wait": False}) for kind in (ChatRagCache, RagCacheLLM)
    ]
    for model in models:
        assert model.invoke("a")
        assert list(model.stream("a"))
        assert asyncio.run(model.ainvoke("a"))
    model = LlamaIndexLLM(cache=rag, max_tokens=2, generate_kwargs={"wait": False})
    assert model.complete("a").text
    assert [*model.stream_complete("a")][-1].text == model.complete("a").text


def test_all_prompts_of_a_batch_are_there_at_once_unless_told_otherwise():
    assert {config.get("max_concurrency") for config in together(None, 8)} == {8, None}
    assert together({"max_concurrency": 2}, 8)[0]["max_concurrency"] == 2
    assert together([{"tags": ["a"]}, {}], 2)[0]["tags"] == ["a"]
    assert together(None, 1000)[0]["max_concurrency"] == MAX_THREADS
    assert together(None, 0) == []
    given = {"tags": ["a"]}
    together(given, 2)
    assert given == {"tags": ["a"]}


def test_every_call_goes_through_the_queue():
    engine = FakeEngine()
    ChatRagCache(cache=engine).invoke("a")
    llama_index(engine).complete("b")
    llama_index(engine).chat([ChatMessage("c")])
    assert [call["wait"] for call in engine.submitted] == [True] * 3


def test_an_interrupt_ends_a_batch_within_a_second(rag, tiny_model, monkeypatch):
    slow = ChatRagCache(cache=rag, max_tokens=2000)
    with interrupts(monkeypatch) as interrupt, watched(tiny_model, 40, interrupt):
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            slow.batch(QUESTIONS)
    assert time.monotonic() - began < 30, "2,000 tokens take longer"
    assert rag.queue.drain(10)
    assert rag.queue.stats().running == 0
    assert chat_of(rag).invoke(QUESTIONS[0]).content
