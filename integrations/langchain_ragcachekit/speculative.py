"""A LangChain chain whose answer begins while its documents are still searched for."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing, contextmanager
from operator import itemgetter
from typing import Any

from langchain_core.documents import Document
from langchain_core.messages import AIMessage
from langchain_core.prompts import BasePromptTemplate
from langchain_core.runnables import Runnable, RunnableConfig, RunnablePassthrough, ensure_config
from langchain_core.runnables.base import coerce_to_runnable

from langchain_ragcachekit.chat import ChatRagCache
from langchain_ragcachekit.messages import format_docs as joined_texts
from langchain_ragcachekit.retriever import ON_STAGE, RagCacheRetriever
from ragcachekit import SpeculativePipeline
from ragcachekit.frameworks import check_pair


class SpeculativeRag(Runnable[Any, AIMessage]):
    """Retriever, prompt and model, which starts to answer before the search has ended.

    Answers as ``{"context": retriever | format_docs, "question": ...} | prompt | llm`` does. At each stage of
    the search, the prompt of its documents is submitted, and cancelled when they change (RAGCache, section
    5.3). A question in the query cache needs neither. Other stores than :class:`RagCacheVectorStore` have no
    stages. ``response_metadata["ragcachekit"]["speculation"]`` tells.

    Callbacks see one run of each part; for the stages, the prompt is rendered without them. Keyword arguments
    of a call, or of ``bind``, are the model's. A ``deadline`` includes the search.

    The input is the question, or a dict of the prompt's values with the question under ``question_key``;
    ``format_docs`` makes its value of ``context_key``. ``max_waiting`` is that of
    :class:`ragcachekit.SpeculativePipeline`, whose figures are in ``pipeline.stats``. TypeError or ValueError
    for another retriever or model, two engines, or a template without one of the keys.

    >>> chain = SpeculativeRag(retriever, prompt, llm) | StrOutputParser()  # doctest: +SKIP
    """

    def __init__(
        self,
        retriever: RagCacheRetriever,
        prompt: Any,
        llm: ChatRagCache,
        *,
        format_docs: Callable[[list[Document]], Any] = joined_texts,
        question_key: str = "question",
        context_key: str = "context",
        max_waiting: int = 1,
    ) -> None:
        check_pair("SpeculativeRag", (retriever, RagCacheRetriever), (llm, ChatRagCache))
        keys = {question_key, context_key}
        if isinstance(prompt, BasePromptTemplate) and (lacking := keys - {*prompt.input_variables}):
            raise ValueError(f"the prompt lacks {sorted(lacking)}; see question_key= and context_key=")
        self._retriever, self._llm = retriever, llm
        self._prompt, self._format = coerce_to_runnable(prompt), coerce_to_runnable(format_docs)
        self._question, self._context = question_key, context_key
        self.pipeline = SpeculativePipeline(llm.rag, max_waiting=max_waiting)

    def invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> AIMessage:
        """Search and answer."""
        with self._asking(input, config, kwargs) as (chain, values):
            return chain.invoke(values, config)

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> AIMessage:
        """:meth:`invoke`, awaited."""
        with self._asking(input, config, kwargs) as (chain, values):
            return await chain.ainvoke(values, config)

    def stream(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Iterator[AIMessage]:
        """Answer piece by piece; ending early cancels the request."""
        with self._asking(input, config, kwargs) as (chain, values):
            yield from chain.stream(values, config)

    async def astream(
        self, input: Any, config: RunnableConfig | None = None, **kwargs: Any
    ) -> AsyncIterator[AIMessage]:
        """:meth:`stream`, awaited."""
        with self._asking(input, config, kwargs) as (chain, values):
            async for chunk in chain.astream(values, config):
                yield chunk

    @contextmanager
    def _asking(
        self, input: Any, config: RunnableConfig | None, kwargs: dict[str, Any]
    ) -> Iterator[tuple[Runnable[Any, AIMessage], dict[str, Any]]]:
        """The chain of one question and its input; what it left running is cancelled."""
        values = input if isinstance(input, dict) else {self._question: input}
        silent: RunnableConfig = {**ensure_config(config), "callbacks": []}

        def prompt_of(documents: tuple[Document, ...]) -> Any:
            context = self._format.invoke(list(documents), silent)
            prompt = self._prompt.invoke({**values, self._context: context}, silent)
            return self._llm.submission(prompt, **kwargs)[0]

        speculation = self.pipeline.begin(**self._llm.submission("", **kwargs)[1])
        found = self._retriever.bind(**{ON_STAGE: speculation.watch(prompt_of)}) | self._format
        inputs = RunnablePassthrough.assign(**{self._context: itemgetter(self._question) | found})
        chain = inputs | self._prompt | self._llm.speculating(speculation).bind(**kwargs)
        with closing(speculation):
            yield chain.with_config(run_name=self.get_name()), values
