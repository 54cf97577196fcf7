"""A LangChain chain whose answer begins while its documents are still searched for."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing, contextmanager, suppress
from operator import itemgetter
from typing import Any

from langchain_core.documents import Document
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.prompts import BasePromptTemplate
from langchain_core.runnables import Runnable, RunnableConfig, RunnablePassthrough, ensure_config
from langchain_core.runnables.base import RunnableBinding, coerce_to_runnable
from langchain_core.runnables.config import patch_config

from langchain_ragcachekit.chat import ChatRagCache
from langchain_ragcachekit.llm import together
from langchain_ragcachekit.messages import format_docs as joined_texts
from langchain_ragcachekit.retriever import ON_STAGE, RagCacheRetriever
from ragcachekit import CancelScope, SpeculativePipeline


class SpeculativeRag(Runnable[Any, AIMessage]):
    """Retriever, prompt and model in one, which starts to answer before the search has ended.

    The answer is that of ``{"context": retriever | format_docs, "question": ...} | prompt | llm``. While the
    index is searched in stages, the prompt of the documents found so far is submitted, and cancelled when
    they change (RAGCache, section 5.3). A question in the query cache needs no search and no speculation.
    Other stores than :class:`RagCacheVectorStore` are searched in one go.
    ``response_metadata["ragcachekit"]["speculation"]`` says how it was.

    Callbacks see one run of each part. The prompt is also rendered, without callbacks, for every stage.
    Keyword arguments of calls are those of the model; a ``deadline`` includes the search.

    Parameters
    ----------
    retriever : RagCacheRetriever
    prompt : Runnable or callable
        Makes the model's prompt of a dict: the input's values, or ``question_key`` where the input is a
        string, and ``context_key``.
    llm : ChatRagCache
        On the same engine as the retriever. It may be bound to arguments or tools.
    format_docs : callable
        Makes the context of the documents.
    max_waiting : int
        As of :class:`ragcachekit.SpeculativePipeline`, whose figures are in ``pipeline.stats``.

    Raises
    ------
    TypeError, ValueError
        For another retriever or model, two engines, or a template that lacks one of the keys.

    Examples
    --------
    >>> chain = SpeculativeRag(retriever, prompt, llm) | StrOutputParser()  # doctest: +SKIP
    >>> chain.invoke("Where does the river flow?")  # doctest: +SKIP
    """

    def __init__(
        self,
        retriever: Runnable[str, list[Document]],
        prompt: Any,
        llm: Runnable[Any, Any],
        *,
        format_docs: Callable[[list[Document]], Any] = joined_texts,
        question_key: str = "question",
        context_key: str = "context",
        max_waiting: int = 1,
    ) -> None:
        (searcher, _), (model, self._bound) = _unbound(retriever), _unbound(llm)
        if not isinstance(searcher, RagCacheRetriever):
            raise TypeError(
                f"SpeculativeRag needs a RagCacheRetriever, got {type(searcher).__name__}: put "
                "RagCacheRetriever.wrap(..., rag=rag) around it"
            )
        if not isinstance(model, ChatRagCache):
            raise TypeError(
                f"SpeculativeRag needs llm=ChatRagCache(rag=rag), got {type(model).__name__}: put what comes "
                "after the model (parsers, retries, fallbacks) after SpeculativeRag"
            )
        if searcher.rag is not model.rag:
            raise ValueError("the retriever and llm need the same engine: give rag= to both")
        keys = {question_key, context_key}
        if isinstance(prompt, BasePromptTemplate) and (lacking := keys - {*prompt.input_variables}):
            raise ValueError(f"the prompt lacks {sorted(lacking)}; see question_key= and context_key=")
        self._retriever, self._llm, self._model = retriever, llm, model
        self._prompt, self._format = coerce_to_runnable(prompt), coerce_to_runnable(format_docs)
        self._question, self._context = question_key, context_key
        self.pipeline = SpeculativePipeline(model.rag, max_waiting=max_waiting)

    def invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> AIMessage:
        """Search and answer."""
        with self._asking(input, config, kwargs) as (chain, values):
            return chain.invoke(values, config)

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> AIMessage:
        """:meth:`invoke`, awaited."""
        with self._asking(input, config, kwargs) as (chain, values):
            return await chain.ainvoke(values, config)

    def stream(
        self, input: Any, config: RunnableConfig | None = None, **kwargs: Any
    ) -> Iterator[AIMessageChunk]:
        """Answer piece by piece; ending early cancels the request."""
        with self._asking(input, config, kwargs) as (chain, values):
            yield from chain.stream(values, config)

    async def astream(
        self, input: Any, config: RunnableConfig | None = None, **kwargs: Any
    ) -> AsyncIterator[AIMessageChunk]:
        """:meth:`stream`, awaited."""
        with self._asking(input, config, kwargs) as (chain, values):
            async for chunk in chain.astream(values, config):
                yield chunk

    def batch(
        self, inputs: Any, config: Any = None, *, return_exceptions: bool = False, **kwargs: Any
    ) -> list[AIMessage]:
        """Answer several questions together; Ctrl-C ends those that run and those that wait."""
        options = {"return_exceptions": return_exceptions, **kwargs}
        return CancelScope().run(super().batch, inputs, together(config, len(inputs)), **options)

    @contextmanager
    def _asking(
        self, input: Any, config: RunnableConfig | None, kwargs: dict[str, Any]
    ) -> Iterator[tuple[Runnable[Any, Any], dict[str, Any]]]:
        """The chain of one question and its input; the request is cancelled with it."""
        values = input if isinstance(input, dict) else {self._question: input}
        options, quiet = {**self._bound, **kwargs}, patch_config(ensure_config(config), callbacks=[])
        speculation = self.pipeline.begin(**self._model.submission("", **options)[1])

        def on_stage(documents: tuple[Document, ...] | None) -> None:
            if documents is None:
                speculation.search = "not staged"
                return
            with suppress(Exception):  # of these documents; the prompt of the last ones is made once more
                context = self._format.invoke(list(documents), quiet)
                prompt = self._prompt.invoke({**values, self._context: context}, quiet)
                speculation.offer(self._model.submission(prompt, **options)[0])

        watched = itemgetter(self._question) | self._retriever.bind(**{ON_STAGE: on_stage}) | self._format
        found = RunnablePassthrough.assign(**{self._context: watched})
        model = _replaced(self._llm, self._model.speculating(speculation)).bind(**kwargs)
        with closing(speculation):
            yield (found | self._prompt | model).with_config(run_name=self.get_name()), values


def _unbound(runnable: Any) -> tuple[Any, dict[str, Any]]:
    """What is in a binding, and the arguments of the binding."""
    kwargs: dict[str, Any] = {}
    while isinstance(runnable, RunnableBinding):
        runnable, kwargs = runnable.bound, {**runnable.kwargs, **kwargs}
    return runnable, kwargs


def _replaced(runnable: Any, inner: Any) -> Any:
    """A binding with something else in it."""
    if not isinstance(runnable, RunnableBinding):
        return inner
    return runnable.model_copy(update={"bound": _replaced(runnable.bound, inner)})
