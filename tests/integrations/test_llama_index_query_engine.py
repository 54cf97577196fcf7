"""A LlamaIndex RetrieverQueryEngine with its default prompts: chunks are found behind their metadata."""

from collections import Counter

import pytest
from integration_kit import FACTS
from llama_index.core import VectorStoreIndex
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events.llm import (
    LLMChatEndEvent,
    LLMChatStartEvent,
    LLMCompletionEndEvent,
)
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.response_synthesizers import ResponseMode
from llama_index.core.schema import TextNode
from llama_kit import Embedder

from llama_index_ragcachekit import RagCacheLLM, RagCacheRetriever

FIRST = "Where was Ada Lind born, who is a baker?"
SECOND = "What does Ada Lind work as, who was born in Bern?"


class Calls(BaseEventHandler):
    """The prompts of chat calls and the reports in their responses."""

    prompts: list
    reports: list

    def handle(self, event, **kwargs):
        if isinstance(event, LLMChatStartEvent):
            self.prompts.append("\n".join(message.content for message in event.messages))
        if isinstance(event, LLMChatEndEvent | LLMCompletionEndEvent):
            self.reports.append(event.response.raw["link"])


@pytest.fixture
def calls():
    handler, dispatcher = Calls(prompts=[], reports=[]), get_dispatcher()
    dispatcher.add_event_handler(handler)
    yield handler
    dispatcher.event_handlers.remove(handler)


@pytest.fixture
def make_engine(rag):
    def make(**settings):
        embedder = Embedder(asked=[])
        nodes = [
            TextNode(text=text, metadata={"file_name": f"facts-{n}.txt", "page": n})
            for n, text in enumerate(FACTS)
        ]
        index = VectorStoreIndex(nodes, embed_model=embedder)
        retriever = RagCacheRetriever(
            index.as_retriever(similarity_top_k=3), embed_model=embedder, cache=rag, tolerance=0.05
        )
        model = RagCacheLLM(cache=rag, max_tokens=6, **settings.pop("model", {}))
        return RetrieverQueryEngine.from_args(
            retriever, llm=model, response_mode=ResponseMode.COMPACT, **settings
        )

    return make


def check_reuse(first, second, calls, rag):
    shared = {item.node.text for item in first.source_nodes} & {
        item.node.text for item in second.source_nodes
    }
    assert shared
    cold, warm = calls.reports
    found = [rag.count_tokens(text) for text in shared]
    assert cold["approximate_tokens"] == 0
    assert warm["approximate_tokens"] >= sum(count - 4 for count in found)
    cached = Counter(use["tokens"] for use in warm["chunks"] if use["source"] != "computed")
    assert not Counter(found) - cached
    assert warm["fallback"] is None


def test_compact_reuses_chunks_behind_metadata_on_the_second_question(make_engine, calls, rag):
    engine = make_engine()
    first, second = engine.query(FIRST), engine.query(SECOND)
    assert "file_name: facts-0.txt\npage: 0\n\n" + FACTS[0] in calls.prompts[1]
    check_reuse(first, second, calls, rag)
    assert engine.query(SECOND).response == engine.query(SECOND).response  # all cached by now


def test_text_completion_prompts_work_too(make_engine, calls, rag):
    engine = make_engine(model={"is_chat_model": False})
    first, second = engine.query(FIRST), engine.query(SECOND)
    assert calls.prompts == []
    check_reuse(first, second, calls, rag)


async def test_async_and_streaming_give_the_same_answer(make_engine, calls):
    engine, streaming = make_engine(), make_engine(streaming=True)
    engine.query(SECOND)
    answer = engine.query(SECOND).response
    assert (await engine.aquery(SECOND)).response == answer
    assert "".join(streaming.query(SECOND).response_gen) == answer
    stream = await streaming.aquery(SECOND)
    assert "".join([piece async for piece in stream.response_gen]) == answer
    assert calls.reports[-1]["approximate_tokens"] > 0
