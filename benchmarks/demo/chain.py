"""The demo's LangChain chain, as a user writes it, and what is watched while it answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
from tqdm.auto import tqdm

from benchmarks.demo.store import CHUNK, SEARCH, TITLE
from benchmarks.world.world import INSTRUCTION, SEPARATOR, Question
from langchain_ragcachekit.messages import to_dicts


@dataclass(frozen=True)
class Wording:
    """A question as it was put: its text may carry a prefix."""

    question: Question
    text: str


@dataclass(frozen=True)
class Asked:
    """One question that went through the chain.

    Attributes
    ----------
    wording : Wording
    answer : str
        What the chain returned.
    found : tuple of (str, int)
        Retrieved chunks in order, as (title, index of the chunk).
    search : int
        Number of the search that found them; an earlier question's after a query-cache hit.
    messages : tuple of dict
        What the chat model was sent.
    report : dict
        The engine's report on this answer.
    """

    wording: Wording
    answer: str
    found: tuple[tuple[str, int], ...]
    search: int
    messages: tuple[dict[str, Any], ...]
    report: dict[str, Any]

    @property
    def right(self) -> bool:
        """Exact match."""
        return self.answer == self.wording.question.answer

    @property
    def has_evidence(self) -> bool:
        """Whether every chunk that the answer needs was retrieved."""
        return has_evidence(self.wording.question, self.found)


def build_chain(retriever: Runnable[str, list[Document]], chat: BaseChatModel) -> Runnable[str, str]:
    """Retrieve, put the chunks into the system message, answer."""
    prompt = ChatPromptTemplate([("system", INSTRUCTION + SEPARATOR + "{context}"), ("human", "{question}")])
    return (
        {"context": retriever | format_docs, "question": RunnablePassthrough()}
        | prompt
        | chat
        | StrOutputParser()
    )


def format_docs(documents: Iterable[Document]) -> str:
    """Chunks as one text."""
    return SEPARATOR.join(document.page_content for document in documents)


def ask(chain: Runnable[str, str], wordings: Sequence[Wording], label: str, progress: bool) -> list[Asked]:
    """Put the questions one after the other."""
    asked = []
    for wording in tqdm(wordings, desc=label, unit="question", disable=not progress):
        watch = Watch()
        answer = chain.invoke(wording.text, {"callbacks": [watch]})
        asked.append(watch.asked(wording, answer))
    return asked


class Watch(BaseCallbackHandler):
    """Notes what the steps of one chain call handed on; the chain itself stays as it is."""

    raise_error = True

    def __init__(self) -> None:
        self._documents: Sequence[Document] = ()
        self._messages: list[BaseMessage] = []
        self._report: dict[str, Any] = {}

    def on_retriever_end(self, documents: Sequence[Document], **kwargs: Any) -> None:
        """Keep the documents; the outermost retriever ends last."""
        self._documents = documents

    def on_chat_model_start(
        self,
        serialized: dict[str, Any],
        messages: list[list[BaseMessage]],
        **kwargs: Any,
    ) -> None:
        """Keep the prompt."""
        self._messages = messages[0]

    def on_llm_end(self, response: LLMResult, **kwargs: Any) -> None:
        """Keep the engine's report."""
        generation = response.generations[0][0]
        if isinstance(generation, ChatGeneration) and isinstance(generation.message, AIMessage):
            self._report = generation.message.response_metadata["ragcachekit"]

    def asked(self, wording: Wording, answer: str) -> Asked:
        """The record of the call that has just ended."""
        search = self._documents[0].metadata[SEARCH]
        found, messages = places(self._documents), tuple(to_dicts(self._messages))
        return Asked(wording, answer, found, search, messages, self._report)


def places(documents: Iterable[Document]) -> tuple[tuple[str, int], ...]:
    """Which chunks these are, as (title, index of the chunk)."""
    return tuple((d.metadata[TITLE], d.metadata[CHUNK]) for d in documents)


def has_evidence(question: Question, found: Iterable[tuple[str, int]]) -> bool:
    """Whether every chunk that the answer needs was found."""
    return set(question.evidence) <= set(found)
