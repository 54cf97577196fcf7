"""A LangChain retriever that answers near-identical questions from a query cache."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

from langchain_core.callbacks import (
    AsyncCallbackManagerForRetrieverRun,
    CallbackManagerForRetrieverRun,
    adispatch_custom_event,
    dispatch_custom_event,
)
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnableConfig, ensure_config
from langchain_core.vectorstores import VectorStore
from pydantic import ConfigDict, Field, PrivateAttr, SkipValidation, model_validator

from langchain_ragcachekit.arguments import (
    INTERNAL,
    RULES,
    CustomPartition,
    called_with,
    prepared,
    vector_store_of,
)
from langchain_ragcachekit.search import Callbacks, Search
from langchain_ragcachekit.vector_path import VectorPath
from ragcachekit import CachedRetrieval, Partition, Partitioner, ProximityCache, Retrieved

logger = logging.getLogger(__name__)

HIT_EVENT = "ragcachekit_query_hit"
MISS_EVENT = "ragcachekit_query_miss"
ENGINE = ("register", "prefetch", "add_query_cache")
"""What is called of the engine here."""

CONFIG = "_run_config"
"""Keyword under which ``invoke`` hands its config on: LangChain gives a retriever only the callbacks."""

Numbered: TypeAlias = list[tuple[int, Document]]


class RagCacheRetriever(BaseRetriever):
    """Wraps any retriever or vector store; a question near enough to an earlier one is not searched.

    What it returns is also registered with the engine, so that the chat model recognises the chunks
    in the prompt, and what lies on disk begins to load. Documents are copies and keep their ``id``.

    A result is found again only for the same namespace, ``k`` and search arguments, the same state of the
    wrapped retriever (its fields and those of what it wraps, at any depth), and, unless that is a plain
    vector store retriever, the same ``configurable`` values of the run. Classes and functions of your own
    may depend on anything: what they find is not cached unless ``partition`` names what counts, or the class
    does so in a method ``cache_key_parts()``. The same holds for functions as search arguments, and for what
    has too much content to be compared at every question. The log says so once.

    Changes of vector stores and document stores that come through their methods (``add_documents``,
    ``delete``, ...) are seen. Call :meth:`clear` after others, such as those of another process.
    ``cache.forget`` drops results that name a forgotten text.

    Every lookup sends the custom event ``ragcachekit_query_hit`` or ``ragcachekit_query_miss`` to the
    callbacks, with the distance of the cached question, the microseconds of the lookup, and a note where
    the question's embedding was of no use (zeros, NaN, another width).

    Attributes
    ----------
    retriever : Runnable
        What is asked on a miss, with the config of the run; a vector store becomes ``as_retriever()``.
    embeddings : Embeddings
        Embeds the question for the lookup. Given the vector store's own object (the default), the
        search uses the same vector and the question is embedded once.
    cache : RagCache or None
        The engine to register chunks with.
    namespace : str or None
        Tenant and corpus; None for the engine's own, ``"default"`` without one.
    k : int or None
        Number of documents; None leaves it to the wrapped retriever. ``invoke(question, k=3)``
        overrides it, as it does other search arguments that the wrapped retriever takes.
    tolerance : float
        Greatest distance of a hit in the metric's unit; 0 is an equal vector (and an equal question,
        where the search does not go by vector). Calibrate anything else.
    capacity : int
        Questions kept.
    metric : {"cosine", "l2", "ip"}
        Distance between questions.
    eviction : {"fifo", "lru"}
        Which question leaves first.
    partition : callable, optional
        ``partition(question, config)`` gives what results depend on beside namespace, ``k`` and search
        arguments (a user's id, groups); None from it: do not cache. The wrapped retriever's state and
        the run's configurable values then count no more, changes of its indexes still do.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    retriever: SkipValidation[Any]
    embeddings: SkipValidation[Any] = None
    cache: SkipValidation[Any] = Field(default=None, exclude=True, repr=False)
    namespace: str | None = None
    k: int | None = Field(default=None, gt=0)
    tolerance: float = 0.0
    capacity: int = 1000
    metric: str = "cosine"
    eviction: str = "fifo"
    partition: SkipValidation[CustomPartition | None] = Field(default=None, exclude=True, repr=False)
    _retrieval: CachedRetrieval[Document] = PrivateAttr()
    _path: VectorPath = PrivateAttr()
    _partitioner: Partitioner = PrivateAttr()
    _ids: itertools.count[int] = PrivateAttr(default_factory=itertools.count)

    @classmethod
    def wrap(
        cls,
        retriever: Runnable[str, list[Document]] | VectorStore,
        *,
        embeddings: Embeddings | None = None,
        cache: Any = None,
        tolerance: float = 0.0,
        capacity: int = 1000,
        metric: str = "cosine",
        eviction: str = "fifo",
        namespace: str | None = None,
        k: int | None = None,
        partition: CustomPartition | None = None,
    ) -> Self:
        """Put a query cache in front of ``retriever``; see the class for the arguments.

        Raises
        ------
        ValueError, TypeError
            For something that is no retriever, missing embeddings, or bad cache settings.
        """
        return cls(
            retriever=retriever,
            embeddings=embeddings,
            cache=cache,
            tolerance=tolerance,
            capacity=capacity,
            metric=metric,
            eviction=eviction,
            namespace=namespace,
            k=k,
            partition=partition,
        )

    @model_validator(mode="after")
    def _prepare(self) -> Self:
        if isinstance(self.retriever, VectorStore):
            self.retriever = self.retriever.as_retriever()
        if not isinstance(self.retriever, Runnable):
            raise ValueError(f"expected a retriever or a vector store, got {type(self.retriever).__name__}")
        if self.embeddings is None and (store := vector_store_of(self.retriever)) is not None:
            self.embeddings = store.embeddings
        if not isinstance(self.embeddings, Embeddings):
            raise ValueError("embeddings= is needed to embed questions for the query cache")
        if self.cache is not None and not all(hasattr(self.cache, name) for name in ENGINE):
            raise ValueError(f"{type(self).__name__} needs cache=RagCache(...) or None, got {self.cache!r}")
        if self.partition is not None and not callable(self.partition):
            raise ValueError(f"partition= must be a function of (question, config), got {self.partition!r}")
        queries = ProximityCache(self.capacity, self.tolerance, self.metric, self.eviction)
        self._retrieval = CachedRetrieval(queries, text=_text)
        self._path = VectorPath(self.embeddings)
        self._partitioner = Partitioner(RULES, self.partition)
        if self.cache is not None:
            self.cache.add_query_cache(self._retrieval)
        return self

    def clear(self) -> int:
        """Forget all cached questions, of all namespaces; returns their number.

        Call it when the index was changed past the methods of the wrapped store.
        """
        return self._retrieval.clear()

    def cache_key_parts(self) -> tuple[object, ...]:
        """What decides about results where this retriever is part of another one that is cached."""
        return self.retriever, self.embeddings, self._space(), self.k, self.tolerance, self.partition

    def invoke(self, input: str, config: RunnableConfig | None = None, **kwargs: Any) -> list[Document]:
        """As of every retriever; the wrapped one runs with the whole ``config``."""
        return super().invoke(input, config, **{CONFIG: ensure_config(config)}, **kwargs)

    async def ainvoke(
        self, input: str, config: RunnableConfig | None = None, **kwargs: Any
    ) -> list[Document]:
        """:meth:`invoke`, awaited."""
        return await super().ainvoke(input, config, **{CONFIG: ensure_config(config)}, **kwargs)

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, **kwargs: Any
    ) -> list[Document]:
        call = self._call(query, kwargs)
        search, place = call.search, call.partition()
        search.embed()
        if place is None or search.vector is None:
            return self._register(_copies(search.by_text(run_manager.get_child)), call)

        def find(ask: Callable[[Callbacks], list[Document]]) -> Callable[[], Numbered]:
            return lambda: self._keep(ask(run_manager.get_child))

        result = self._retrieval.get(
            search.vector, place, find(search.run), find(search.by_text), lambda: call.is_in(place)
        )
        if run_manager.handlers:
            config: RunnableConfig = {"callbacks": run_manager.get_child()}
            dispatch_custom_event(_event(result.hit), _measured(result), config=config)
        return self._register(_copies(result.documents), call)

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, **kwargs: Any
    ) -> list[Document]:
        call = self._call(query, kwargs)
        search, place = call.search, call.partition()
        await search.aembed()
        if place is None or search.vector is None:
            return self._register(_copies(await search.aby_text(run_manager.get_child)), call)

        def find(ask: Callable[[Callbacks], Awaitable[list[Document]]]) -> Callable[[], Awaitable[Numbered]]:
            async def found() -> Numbered:
                return self._keep(await ask(run_manager.get_child))

            return found

        result = await self._retrieval.aget(
            search.vector, place, find(search.arun), find(search.aby_text), lambda: call.is_in(place)
        )
        if run_manager.handlers:
            config: RunnableConfig = {"callbacks": run_manager.get_child()}
            await adispatch_custom_event(_event(result.hit), _measured(result), config=config)
        return self._register(_copies(result.documents), call)

    def _call(self, query: str, kwargs: dict[str, Any]) -> _Call:
        given = kwargs.pop(CONFIG, None)
        retriever, config = prepared(self.retriever, ensure_config(given))
        overrides = {**({} if self.k is None else {"k": self.k}), **kwargs}
        search = Search(retriever, self.embeddings, self._path, query, overrides, config)
        return _Call(self, query, retriever, overrides, config, search, self._retrieval.epoch)

    def _space(self) -> str:
        return self.namespace or getattr(self.cache, "namespace", None) or "default"

    def _keep(self, documents: Sequence[Document]) -> Numbered:
        # Numbered, not by Document.id: splitters give several chunks the id of their parent, and
        # metadata may belong to one question (scores, highlights). Not copied: only copies leave.
        return list(zip(self._ids, documents, strict=False))

    def _register(self, documents: list[Document], call: _Call) -> list[Document]:
        if self.cache is not None and documents:
            texts, space = [_text(d) for d in documents], self._space()

            def register() -> None:
                self.cache.register(texts, namespace=space)
                self.cache.prefetch(texts, namespace=space)  # loads while the chain makes its prompt

            try:
                self._retrieval.while_current(call.epoch, register)  # or one of them may be forgotten
            except Exception:  # the documents are found; without registration they are only not reused
                logger.warning("could not register the retrieved chunks with the engine", exc_info=True)
        return documents


@dataclass(frozen=True)
class _Call:
    """One question on its way: what is searched, and what its result depends on."""

    wrapper: RagCacheRetriever
    query: str
    retriever: Runnable[Any, Any]
    overrides: dict[str, Any]
    config: RunnableConfig
    search: Search
    epoch: int

    def partition(self) -> Partition | None:
        """The part of the query cache that the question may use; None if nothing may be cached."""
        wrapper = self.wrapper
        k, arguments = called_with(self.overrides)
        if arguments is None:
            return None
        configurable = self.config.get("configurable") or {}
        text = self.query if wrapper.tolerance == 0 and self.search.is_by_text else None
        return wrapper._partitioner.partition(
            wrapper._space(),
            k,
            self.retriever,
            (*arguments, wrapper.embeddings, text),
            configurable={n: value for n, value in configurable.items() if not n.startswith(INTERNAL)},
            question=(self.query, self.config),
        )

    def is_in(self, place: Partition) -> bool:
        """Whether the partition is the same after the search."""
        return self.wrapper._partitioner.is_unchanged(place, self.partition())


def _text(document: Document) -> str:
    return document.page_content


def _copies(documents: Iterable[Document]) -> list[Document]:
    # The text is immutable and shared; model_copy keeps the id and the fields of subclasses.
    return [d.model_copy(update={"metadata": _copy_metadata(d.metadata)}) for d in documents]


def _copy_metadata(metadata: dict[str, Any]) -> dict[str, Any]:
    # deepcopy costs more than the lookup, and most metadata is flat.
    if all(value is None or isinstance(value, str | int | float) for value in metadata.values()):
        return dict(metadata)
    try:
        return deepcopy(metadata)
    except Exception:  # a lock, a client: whoever put it there shares it
        return dict(metadata)


def _event(hit: bool) -> str:
    return HIT_EVENT if hit else MISS_EVENT


def _measured(result: Retrieved[Document]) -> dict[str, float | str | None]:
    measured: dict[str, float | str | None] = {"distance": result.distance, "lookup_us": result.lookup_us}
    return measured | ({"note": result.note} if result.note else {})
