"""The demo's LangChain chain, as a user writes it, and what is watched while it answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.outputs import ChatGeneration, LLMResult
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnablePassthrough

from benchmarks.demo.corpus import CHUNK
from langchain_ragcachekit.messages import to_dicts
from ragcachekit.commands.questions import INSTRUCTION, SEPARATOR

PROMPT = ChatPromptTemplate([("system", INSTRUCTION + SEPARATOR + "{context}"), ("human", "{question}")])


@dataclass(frozen=True)
class Asked:
    """One question that went through the chain: what it retrieved, sent and got, and the engine's report."""

    answer: str
    chunks: tuple[int, ...]
    messages: tuple[dict[str, Any], ...]
    report: dict[str, Any]


def build_chain(retriever: Runnable[str, list[Document]], chat: BaseChatModel) -> Runnable[str, str]:
    """Retrieve, put the chunks into the system message, answer."""
    context = retriever | (lambda found: SEPARATOR.join(document.page_content for document in found))
    return {"context": context, "question": RunnablePassthrough()} | PROMPT | chat | StrOutputParser()


def messages(texts: Sequence[str], question: str) -> list[dict[str, Any]]:
    """The prompt that the chain makes of these chunks."""
    filled = PROMPT.invoke({"context": SEPARATOR.join(texts), "question": question})
    return to_dicts(filled.to_messages())


def ask(chain: Runnable[str, str], question: str) -> Asked:
    """Put one question."""
    watch = Watch()
    answer = chain.invoke(question, {"callbacks": [watch]})
    return Asked(answer, watch.chunks, watch.messages, watch.report)


class Watch(BaseCallbackHandler):
    """Notes what the steps of one chain call handed on; the chain itself stays as it is."""

    raise_error = True

    def __init__(self) -> None:
        self.chunks: tuple[int, ...] = ()
        self.messages: tuple[dict[str, Any], ...] = ()
        self.report: dict[str, Any] = {}

    def on_retriever_end(self, documents: Sequence[Document], **kwargs: Any) -> None:
        """Keep the chunks; the outermost retriever ends last."""
        self.chunks = tuple(document.metadata[CHUNK] for document in documents)

    def on_chat_model_start(
        self, serialized: dict[str, Any], messages: list[list[BaseMessage]], **kwargs: Any
    ) -> None:
        """Keep the prompt."""
        self.messages = tuple(to_dicts(messages[0]))

    def on_llm_end(self, response: LLMResult, **kwargs: Any) -> None:
        """Keep the engine's report."""
        generation = response.generations[0][0]
        if isinstance(generation, ChatGeneration) and isinstance(generation.message, AIMessage):
            self.report = generation.message.response_metadata["ragcachekit"]
