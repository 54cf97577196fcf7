"""For LlamaIndex: an embedding model that counts words, and a look at the events that are sent."""

from contextlib import contextmanager

from integration_kit import WordEmbeddings
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events.llm import (
    LLMChatEndEvent,
    LLMChatStartEvent,
    LLMCompletionEndEvent,
    LLMCompletionStartEvent,
)


class Embedder(BaseEmbedding):
    """Word counts; remembers the questions that it embedded."""

    asked: list

    def _get_query_embedding(self, query):
        self.asked.append(query)
        return WordEmbeddings().embed_query(query)

    async def _aget_query_embedding(self, query):
        return self._get_query_embedding(query)

    def _get_text_embedding(self, text):
        return WordEmbeddings().embed_query(text)


class Seen(BaseEventHandler):
    """Keeps the events of one class; of all calls the prompts, answers and chunks in reports."""

    kind: type
    events: list
    prompts: list
    chunks: list
    answers: list

    def handle(self, event, **kwargs):
        if isinstance(event, self.kind):
            self.events.append(event)
        if isinstance(event, LLMChatStartEvent):
            self.prompts.append("\n".join(message.content for message in event.messages))
        if isinstance(event, LLMCompletionStartEvent):
            self.prompts.append(event.prompt)
        if isinstance(event, LLMChatEndEvent):
            said = [{"role": one.role.value, "content": one.content} for one in event.messages]
            self.answers.append((said, event.response.message.content))
        if isinstance(event, LLMCompletionEndEvent):
            self.answers.append((event.prompt, event.response.text))
        if isinstance(event, LLMChatEndEvent | LLMCompletionEndEvent):
            self.chunks += event.response.raw["link"]["chunks"]


@contextmanager
def seeing(kind):
    """The events of a class that are sent inside."""
    handler, dispatcher = Seen(kind=kind, events=[], prompts=[], chunks=[], answers=[]), get_dispatcher()
    dispatcher.add_event_handler(handler)
    try:
        yield handler
    finally:
        dispatcher.event_handlers.remove(handler)
