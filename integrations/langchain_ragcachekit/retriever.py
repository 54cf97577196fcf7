"""A LangChain retriever that answers near-identical questions from a query cache."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, Self, Unpack

from langchain_core.callbacks import (
    AsyncCallbackManagerForRetrieverRun,
    BaseCallbackManager,
    CallbackManagerForRetrieverRun,
    adispatch_custom_event,
    dispatch_custom_event,
)
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnableConfig, ensure_config, run_in_executor
from langchain_core.runnables.configurable import DynamicRunnable
from langchain_core.vectorstores import VectorStore, VectorStoreRetriever
from pydantic import ConfigDict, Field, PrivateAttr, SkipValidation, model_validator

from langchain_ragcachekit.search import DEFAULT_K, LANGCHAIN, Search, vector_store_of
from langchain_ragcachekit.vector_store import RagCacheVectorStore
from ragcachekit.frameworks import refuse_cache
from ragcachekit.retrieval.plumbing import (
    Call,
    Order,
    Partition,
    Retrieved,
    RetrieverCache,
    RetrieverSettings,
    finished,
)

HIT_EVENT = "ragcachekit_query_hit"
MISS_EVENT = "ragcachekit_query_miss"

INTERNAL = "__pregel"  # prefix of LangGraph's own names among the configurable values of a run
RANKING = ("k", "fetch_k", "lambda_mult", "score_threshold")  # search arguments that are no filter
UNSTATED_K = 1  # of a partition where none was given
CONFIG = "_run_config"
"""Keyword under which ``invoke`` passes its config on: LangChain gives a retriever only the callbacks."""
ON_STAGE = "_on_stage"
"""Keyword of ``invoke`` for what is called at each stage, as ``on_stage`` of a ``Call``."""


class RagCacheRetriever(BaseRetriever):
    """Wraps any retriever or vector store; a question near enough to an earlier one is not searched.

    Its results are also registered with the engine, so that the chat model recognises the chunks in the
    prompt and entries on disk begin to load. Documents are copies with the same ``id``.

    A result is found again only for the same namespace, ``k``, search arguments, fields of the wrapped
    retriever and, unless that is a plain vector store retriever, ``configurable`` values of the run. What
    your own classes and functions find is not cached unless ``partition``, or their method
    ``cache_key_parts()``, names what counts. Changes of stores through their methods are seen; call
    ``query_cache.clear()`` after others. ``rag.forget`` drops results that name a forgotten text.

    Every lookup sends the custom event ``ragcachekit_query_hit`` or ``ragcachekit_query_miss`` to the
    callbacks: distance, microseconds, and why a cached question was not used.

    Attributes
    ----------
    retriever : Runnable
        What is asked on a miss, with the config of the run; a vector store becomes ``as_retriever()``.
    embeddings : Embeddings
        Embeds the question for the lookup. Given the vector store's own object (the default), the
        search uses the same vector and the question is embedded once.
    k : int or None
        Number of documents; None is the wrapped retriever's own. ``invoke(question, k=3)``
        overrides it, as it does other search arguments that the wrapped retriever takes.
    rag, namespace, tolerance, capacity, metric, ttl, max_idle, guard, version, partition, order, path
        See :class:`ragcachekit.RetrieverSettings`; ``partition`` is called with (question, config).
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    retriever: SkipValidation[Any]
    embeddings: SkipValidation[Any] = None
    rag: SkipValidation[Any] = Field(default=None, exclude=True, repr=False)
    namespace: str | None = None
    k: int | None = Field(default=None, gt=0)
    tolerance: float = 0.0
    capacity: int = 1000
    metric: str | None = None
    ttl: float | None = Field(default=None, gt=0)
    max_idle: float | None = Field(default=None, gt=0)
    guard: SkipValidation[bool | Callable[[str, str], bool]] = True
    version: SkipValidation[Callable[[], object] | None] = Field(default=None, exclude=True, repr=False)
    partition: SkipValidation[Callable[[str, RunnableConfig], object] | None] = Field(
        default=None, exclude=True, repr=False
    )
    order: Order = "found"
    path: str | os.PathLike[str] | None = None
    _retrieval: RetrieverCache[Document] = PrivateAttr()

    @classmethod
    def wrap(
        cls,
        retriever: Runnable[str, list[Document]] | VectorStore,
        *,
        embeddings: Embeddings | None = None,
        k: int | None = None,
        **settings: Unpack[RetrieverSettings],
    ) -> Self:
        """Put a query cache in front of ``retriever``; see the class for the arguments.

        ValueError or TypeError for no retriever, missing embeddings, or bad cache settings.
        """
        return cls(retriever=retriever, embeddings=embeddings, k=k, **settings)

    @classmethod
    def from_documents(
        cls,
        documents: list[Document],
        embeddings: Embeddings,
        *,
        index: str = "faiss-flat",
        k: int = DEFAULT_K,
        index_metric: str = "cosine",
        index_options: dict[str, Any] | None = None,
        **settings: Unpack[RetrieverSettings],
    ) -> Self:
        """A retriever over an index of its own; see :class:`RagCacheVectorStore` for its arguments.

        With a ``path``, documents that are there already are not embedded again, and an empty list opens
        what is there. ``retriever.vectorstore`` adds and deletes. Results are put in order anew for each
        question, and found again until the index changes, with a ``path`` by later processes, too.
        """
        path = settings.pop("path", None)
        store = RagCacheVectorStore(
            embeddings, index=index, path=path, metric=index_metric, **(index_options or {})
        )
        settings["path"] = None if path is None else Path(path) / "questions"
        retriever = cls.wrap(store, k=k, **settings)
        store.add_documents(documents)
        return retriever

    @property
    def query_cache(self) -> RetrieverCache[Document]:
        """The cached questions: ``invalidate(ids=, texts=, where=)``, ``clear()``, ``stats()``."""
        return self._retrieval

    @property
    def vectorstore(self) -> VectorStore | None:
        """The vector store that is searched, if a vector store's own retriever is wrapped."""
        return vector_store_of(self.retriever)

    @model_validator(mode="before")
    @classmethod
    def _refuse_cache(cls, values: dict[str, Any]) -> dict[str, Any]:
        refuse_cache(values)
        return values

    @model_validator(mode="after")
    def _prepare(self) -> Self:
        if isinstance(self.retriever, VectorStore):
            self.retriever = self.retriever.as_retriever()
        if not isinstance(self.retriever, Runnable):
            raise ValueError(f"expected a retriever or a vector store, got {type(self.retriever).__name__}")
        store = vector_store_of(self.retriever)
        if self.embeddings is None and store is not None:
            self.embeddings = store.embeddings
        index = store.index if isinstance(store, RagCacheVectorStore) else None
        if not isinstance(self.embeddings, Embeddings):
            raise ValueError("embeddings= is needed to embed questions for the query cache")
        settings: Any = {
            name: getattr(self, name) for name in RetrieverSettings.__annotations__.keys() - {"namespace"}
        }
        try:
            self._retrieval = RetrieverCache(
                LANGCHAIN, retriever=self.retriever, store=store, index=index, **settings
            )
        except TypeError as error:
            raise ValueError(str(error)) from error
        if type(self.retriever) is VectorStoreRetriever and self.partition is None:
            self._retrieval.follow(self.retriever, lambda: self._namespace, self._nearest)
        return self

    def _nearest(self, text: str, most: int) -> list[Document]:
        (vector,) = self.embeddings.embed_documents([text])
        given = {n: one for n, one in self.retriever.search_kwargs.items() if n not in RANKING}
        return self.retriever.vectorstore.similarity_search_by_vector(vector, k=most, **given)  # type: ignore[no-any-return]

    @property
    def _namespace(self) -> str:
        return self._retrieval.namespace_of(self.namespace)

    def cache_key_parts(self) -> tuple[object, ...]:
        """What decides about results where this retriever is part of another one that is cached."""
        names = "retriever", "embeddings", "_namespace", "k", "tolerance", "partition", "order"
        return tuple(getattr(self, name) for name in names)

    def invoke(self, input: str, config: RunnableConfig | None = None, **kwargs: Any) -> list[Document]:
        """As of every retriever; the wrapped one runs with the whole ``config``."""
        config = ensure_config(config)
        return super().invoke(input, config, **{CONFIG: config}, **kwargs)

    async def ainvoke(
        self, input: str, config: RunnableConfig | None = None, **kwargs: Any
    ) -> list[Document]:
        """:meth:`invoke`, awaited."""
        config = ensure_config(config)
        return await super().ainvoke(input, config, **{CONFIG: config}, **kwargs)

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, **kwargs: Any
    ) -> list[Document]:
        call = self._call(query, kwargs, run_manager.get_child, is_async=False)
        documents, result = finished(self._retrieval.retrieve(call))
        if result is not None and run_manager.handlers:
            dispatch_custom_event(*_event(result), config={"callbacks": run_manager.get_child()})
        return [_copied(document) for document in documents]

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, **kwargs: Any
    ) -> list[Document]:
        call = self._call(query, kwargs, run_manager.get_child, is_async=True)
        documents, result = await self._retrieval.retrieve(call)
        if result is not None and run_manager.handlers:
            await adispatch_custom_event(*_event(result), config={"callbacks": run_manager.get_child()})
        return [_copied(document) for document in documents]

    def _call(
        self, query: str, kwargs: dict[str, Any], callbacks: Callable[[], BaseCallbackManager], is_async: bool
    ) -> Call[Document]:
        given, on_stage = kwargs.pop(CONFIG, None) or ensure_config(), kwargs.pop(ON_STAGE, None)
        retriever, config = self.retriever, given
        if isinstance(retriever, DynamicRunnable):
            retriever, config = retriever.prepare(given)
        overrides = {**({} if self.k is None else {"k": self.k}), **kwargs}
        if overrides.keys() - {"k"}:
            self._retrieval.unfollow()
        search = Search(retriever, self.embeddings, query, overrides, config, callbacks)
        embed = self.embeddings.aembed_query if is_async else self.embeddings.embed_query
        return Call(
            self._namespace,
            query,
            lambda: self._partition(search),
            lambda: embed(query),
            partial(search.run, is_async=is_async),
            search.own,
            partial(run_in_executor, None) if is_async else None,
            on_stage,
        )

    def _partition(self, search: Search) -> Partition | None:
        """The part of the query cache that the question may use; None if nothing may be cached."""
        configurable: dict[str, Any] = {}
        if type(search.retriever) is not VectorStoreRetriever:  # which reads none
            values = search.config.get("configurable") or {}
            configurable = {n: value for n, value in values.items() if not n.startswith(INTERNAL)}
        arguments: object = search.arguments.get("filter")
        if search.own is None:
            text = search.query if self.tolerance == 0 and search.store is None else None
            arguments = (dict(search.overrides), self.embeddings, text)
        return self._retrieval.partition(
            self._namespace,
            search.overrides.get("k", UNSTATED_K) if search.own is None else search.own.k,
            search.retriever,
            arguments,
            own=search.own,
            configurable=configurable,
            question=(search.query, search.config),
        )


def _copied(document: Document) -> Document:
    # The text is immutable and shared; model_copy copies the id and the fields of subclasses.
    metadata = dict(document.metadata)
    if not all(value is None or isinstance(value, str | int | float) for value in metadata.values()):
        with suppress(Exception):  # a lock, a client: whoever put it there shares it
            metadata = deepcopy(metadata)
    return document.model_copy(update={"metadata": metadata})


def _event(result: Retrieved[Document]) -> tuple[str, dict[str, float | str | None]]:
    measured: dict[str, float | str | None] = {"distance": result.distance, "lookup_us": result.lookup_us}
    more = {"note": result.note, "refused": result.refused}
    return HIT_EVENT if result.hit else MISS_EVENT, measured | {n: one for n, one in more.items() if one}
