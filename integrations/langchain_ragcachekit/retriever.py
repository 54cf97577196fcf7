"""A LangChain retriever that answers near-identical questions from a query cache."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Sequence
from copy import deepcopy
from typing import Any, Self

from langchain_core.callbacks import (
    AsyncCallbackManagerForRetrieverRun,
    CallbackManagerForRetrieverRun,
    adispatch_custom_event,
    dispatch_custom_event,
)
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.vectorstores import VectorStore, VectorStoreRetriever
from pydantic import ConfigDict, Field, PrivateAttr, SkipValidation, model_validator

from langchain_ragcachekit.arguments import SCALARS, partition, search_arguments
from langchain_ragcachekit.search import Search
from langchain_ragcachekit.vector_path import VectorPath
from ragcachekit import CachedRetrieval, ProximityCache

logger = logging.getLogger(__name__)

HIT_EVENT = "ragcachekit_query_hit"
MISS_EVENT = "ragcachekit_query_miss"
ENGINE = ("register", "prefetch")
"""What is called of the engine here."""


class RagCacheRetriever(BaseRetriever):
    """Wraps any retriever or vector store; a question near enough to an earlier one is not searched.

    What it returns is also registered with the engine, so that the chat model recognises the chunks
    in the prompt, and what lies on disk begins to load. Results are cached under the namespace, ``k``,
    filters and every other search argument. If a search argument is a function, nothing is cached: what
    it lets through may depend on who asks. Documents are copies and keep their ``id``; call :meth:`clear`
    when the index changes.

    Every lookup sends the custom event ``ragcachekit_query_hit`` or ``ragcachekit_query_miss`` to the
    callbacks, with the distance of the cached question and the microseconds of the lookup.

    Attributes
    ----------
    retriever : Runnable
        What is asked on a miss; a vector store becomes ``as_retriever()``.
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
        Greatest distance of a hit in the metric's unit; 0 is an equal vector. Calibrate anything else.
    capacity : int
        Questions kept.
    metric : {"cosine", "l2", "ip"}
        Distance between questions.
    eviction : {"fifo", "lru"}
        Which question leaves first.
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
    _retrieval: CachedRetrieval[Document] = PrivateAttr()
    _path: VectorPath = PrivateAttr()
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
        )

    @model_validator(mode="after")
    def _prepare(self) -> Self:
        if isinstance(self.retriever, VectorStore):
            self.retriever = self.retriever.as_retriever()
        if not isinstance(self.retriever, Runnable):
            raise ValueError(f"expected a retriever or a vector store, got {type(self.retriever).__name__}")
        if self.embeddings is None and isinstance(self.retriever, VectorStoreRetriever):
            self.embeddings = self.retriever.vectorstore.embeddings
        if not isinstance(self.embeddings, Embeddings):
            raise ValueError("embeddings= is needed to embed questions for the query cache")
        if self.cache is not None and not all(hasattr(self.cache, name) for name in ENGINE):
            raise ValueError(f"{type(self).__name__} needs cache=RagCache(...) or None, got {self.cache!r}")
        queries = ProximityCache(self.capacity, self.tolerance, self.metric, self.eviction)
        self._retrieval = CachedRetrieval(queries)
        self._path = VectorPath(self.retriever, self.embeddings)
        return self

    def clear(self) -> int:
        """Forget all cached questions, of all namespaces; returns their number.

        Call it when documents were added to the index, changed or deleted.
        """
        return self._retrieval.clear()

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, **kwargs: Any
    ) -> list[Document]:
        search, place = self._plan(query, kwargs)
        search.embed()
        if place is None or search.vector is None:
            return self._register(_copies(search.by_text(run_manager.get_child)))

        def find() -> list[tuple[int, Document]]:
            return self._keep(search.run(run_manager.get_child))

        result = self._retrieval.get(search.vector, place, find)
        if run_manager.handlers:
            config: RunnableConfig = {"callbacks": run_manager.get_child()}
            dispatch_custom_event(_event(result.hit), _measured(result), config=config)
        return self._register(_copies(result.documents))

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, **kwargs: Any
    ) -> list[Document]:
        search, place = self._plan(query, kwargs)
        await search.aembed()
        if place is None or search.vector is None:
            return self._register(_copies(await search.aby_text(run_manager.get_child)))

        async def find() -> list[tuple[int, Document]]:
            return self._keep(await search.arun(run_manager.get_child))

        result = await self._retrieval.aget(search.vector, place, find)
        if run_manager.handlers:
            config: RunnableConfig = {"callbacks": run_manager.get_child()}
            await adispatch_custom_event(_event(result.hit), _measured(result), config=config)
        return self._register(_copies(result.documents))

    def _plan(self, query: str, kwargs: dict[str, Any]) -> tuple[Search, Any]:
        """The search that a miss would make, and the partition to look it up in (None: do not)."""
        overrides = {**({} if self.k is None else {"k": self.k}), **kwargs}
        arguments = search_arguments(self.retriever, overrides)
        search = Search(self.retriever, self.embeddings, self._path, query, overrides, arguments)
        return search, partition(self._space(), self.retriever, arguments)

    def _space(self) -> str:
        return self.namespace or getattr(self.cache, "namespace", None) or "default"

    def _keep(self, documents: Sequence[Document]) -> list[tuple[int, Document]]:
        # Numbered, not by Document.id: splitters give several chunks the id of their parent, and
        # metadata may belong to one question (scores, highlights). Not copied: only copies leave.
        return list(zip(self._ids, documents, strict=False))

    def _register(self, documents: list[Document]) -> list[Document]:
        if self.cache is not None and documents:
            try:
                texts, space = [d.page_content for d in documents], self._space()
                self.cache.register(texts, namespace=space)
                self.cache.prefetch(texts, namespace=space)  # loads while the chain makes its prompt
            except Exception:  # the documents are found; without registration they are only not reused
                logger.warning("could not register the retrieved chunks with the engine", exc_info=True)
        return documents


def _copies(documents: Iterable[Document]) -> list[Document]:
    # The text is immutable and shared; model_copy keeps the id and the fields of subclasses.
    return [d.model_copy(update={"metadata": _copy_metadata(d.metadata)}) for d in documents]


def _copy_metadata(metadata: dict[str, Any]) -> dict[str, Any]:
    # deepcopy costs more than the lookup, and most metadata is flat.
    flat = all(value is None or isinstance(value, SCALARS) for value in metadata.values())
    return dict(metadata) if flat else deepcopy(metadata)


def _event(hit: bool) -> str:
    return HIT_EVENT if hit else MISS_EVENT


def _measured(result: Any) -> dict[str, float | None]:
    return {"distance": result.distance, "lookup_us": result.lookup_us}
