"""SpeculativeRag: the answers of the plain chain, begun during the search; no request goes on alone."""

import asyncio
import time
from contextlib import nullcontext

import pytest
from integration_kit import PROMPT, AtTheEnd, WordEmbeddings, raising
from langchain_core.output_parsers import StrOutputParser
from langchain_core.runnables import RunnablePassthrough
from langchain_core.tracers.run_collector import RunCollectorCallbackHandler

from langchain_ragcachekit import ChatRagCache, RagCacheLLM, RagCacheRetriever, SpeculativeRag, format_docs
from queue_kit import until
from ragcachekit import DeadlineExceeded

QUESTIONS = ["Where was Ada Lind born?", "Which company builds boats?", "Where is Rome?"]


@pytest.fixture
def ask(rag, documents):
    """Makes a chain; ``work`` is called in the last stage of its searches."""

    def made(work=lambda: None, order="found", **llm):
        own = RagCacheRetriever.from_documents(documents, WordEmbeddings(), rag=rag)
        inner = own.vectorstore.as_retriever(search_kwargs={"filter": AtTheEnd(work), "k": 2})
        retriever = RagCacheRetriever.wrap(inner, rag=rag, order=order)
        # policy="full" is exact: what is cached does not change answers
        llm = ChatRagCache(rag=rag, **{"policy": "full", "max_tokens": 6} | llm)
        plain = {"context": retriever | format_docs, "input": RunnablePassthrough()} | PROMPT | llm
        expected = [plain.invoke(question).content for question in QUESTIONS]
        retriever.query_cache.clear()
        chain = SpeculativeRag(retriever, PROMPT, llm, format_docs=of_both, question_key="input")
        return chain, expected, retriever

    return made


def of_both(documents):
    first, second = documents  # an error at a stage with one is none of the question
    return format_docs([first, second])


def speculation_of(message):
    return message.response_metadata["ragcachekit"]["speculation"]


@pytest.mark.parametrize(("order", "policy"), [("found", "full"), ("cached", "prefix")])
async def test_every_way_to_ask_gives_the_answers_of_the_plain_chain(ask, order, policy):
    chain, expected, retriever = ask(order=order, policy=policy)
    text = chain | StrOutputParser()

    async def streamed(question):
        return "".join([piece async for piece in text.astream(question)])

    for number, way in enumerate(
        (
            lambda: [text.invoke({"input": question}) for question in QUESTIONS],
            lambda: ["".join(text.stream(question)) for question in QUESTIONS],
            lambda: text.batch(QUESTIONS),
            lambda: asyncio.gather(*(text.ainvoke(question) for question in QUESTIONS)),
            lambda: asyncio.gather(*map(streamed, QUESTIONS)),
        )
    ):
        retriever.query_cache.clear()
        answers = way()
        assert (await answers if asyncio.isfuture(answers) else answers) == expected
        assert chain.pipeline.stats.searches == (number + 1) * len(QUESTIONS)
    assert chain.pipeline.stats.right > 0
    message = chain.invoke(QUESTIONS[0])
    assert message.content == expected[0]
    assert speculation_of(message)["search"] == "cached"


def test_the_answer_is_there_when_the_search_ends(ask, rag):
    stats = rag.queue.stats
    chain, (expected, *_), _ = ask(rag.queue.drain)
    done = stats().done
    message = chain.invoke(QUESTIONS[0])
    assert message.content == expected
    assert speculation_of(message)["right"]
    assert stats().done == done + 1


def test_a_provisional_answer_that_failed_is_asked_for_again(ask, rag):
    stats, is_over = rag.queue.stats, [True]

    def fails(ids, scores):
        return scores if is_over else raising(OSError("no memory"))

    def end():
        rag.queue.drain()
        is_over.append(True)

    chain, (expected, *_), _ = ask(end, generate_kwargs={"logits_processor": [fails]})
    is_over.clear()
    message = chain.invoke(QUESTIONS[0])
    assert message.content == expected
    assert stats().failed > 0
    assert not speculation_of(message)["right"]


async def left_by_a_task(chain):
    async for _ in chain.astream(QUESTIONS[0]):
        break


async def cancelled(chain):
    task = asyncio.create_task(chain.ainvoke(QUESTIONS[0]))
    await asyncio.sleep(0.3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize(
    ("at_the_end", "way", "error"),
    [
        (lambda: raising(OSError("lost")), lambda chain: chain.invoke(QUESTIONS[0]), OSError),
        (lambda: raising(OSError("lost")), lambda chain: chain.batch(QUESTIONS), OSError),
        (lambda: time.sleep(0.5), lambda chain: chain.invoke(QUESTIONS[0], deadline=0.3), DeadlineExceeded),
        (lambda: None, lambda chain: next(chain.stream(QUESTIONS[0])), None),
        (lambda: None, lambda chain: asyncio.run(left_by_a_task(chain)), None),
        (lambda: time.sleep(0.6), lambda chain: asyncio.run(cancelled(chain)), None),
    ],
)
def test_no_request_goes_on_without_its_reader(ask, rag, at_the_end, way, error):
    works, stats = [lambda: None], rag.queue.stats
    chain, _, _ = ask(lambda: works[-1]())
    before = stats()
    works.append(at_the_end)
    with pytest.raises(error) if error else nullcontext():
        way(chain.bind(max_tokens=2000, min_new_tokens=2000))
    done = before.submitted - before.cancelled
    until(lambda: stats().submitted - stats().cancelled - stats().expired == done)
    assert stats().submitted > before.submitted


def test_callbacks_see_each_part_once(ask):
    chain, collector = ask()[0], RunCollectorCallbackHandler()
    chain.invoke(QUESTIONS[0], {"callbacks": [collector], "tags": ["mine"]})
    (root,) = collector.traced_runs

    def kinds(run):
        assert "mine" in run.tags
        return [run.run_type, *(kind for child in run.child_runs for kind in kinds(child))]

    assert root.name == "SpeculativeRag"
    assert [kinds(root).count(kind) for kind in ("retriever", "prompt", "llm")] == [1, 1, 1]


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (lambda rag, own: {"retriever": own.vectorstore.as_retriever()}, TypeError, "RagCacheRetriever"),
        (lambda rag, own: {"retriever": RagCacheRetriever.wrap(own.vectorstore)}, ValueError, "one engine"),
        (lambda rag, own: {"llm": ChatRagCache(rag=rag) | StrOutputParser()}, TypeError, "after it"),
        (lambda rag, own: {"llm": RagCacheLLM(rag=rag)}, TypeError, "ChatRagCache"),
        (lambda rag, own: {"question_key": "question"}, ValueError, r"lacks \['question'\]"),
    ],
)
def test_what_cannot_work_is_refused(rag, documents, wrong, error, message):
    own = RagCacheRetriever.from_documents(documents, WordEmbeddings(), rag=rag)
    given = {"retriever": own, "prompt": PROMPT, "llm": ChatRagCache(rag=rag), "question_key": "input"}
    with pytest.raises(error, match=message):
        SpeculativeRag(**given | wrong(rag, own))
