"""A LlamaIndex retriever that answers near-identical questions from a query cache."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from copy import copy, deepcopy
from functools import partial
from pathlib import Path
from typing import Any, Self, Unpack

from llama_index.core import StorageContext, VectorStoreIndex
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.callbacks import CallbackManager
from llama_index.core.constants import DEFAULT_SIMILARITY_TOP_K
from llama_index.core.instrumentation import get_dispatcher  # type: ignore[attr-defined]
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import BaseNode, NodeWithScore, QueryBundle
from llama_index.core.settings import Settings

from llama_index_ragcachekit.search import LLAMA_INDEX, is_by_embedding, own_index_of, own_search
from llama_index_ragcachekit.vector_store import RagCacheVectorStore
from ragcachekit.frameworks import refuse_cache
from ragcachekit.retrieval.plumbing import (
    Call,
    OwnSearch,
    Partition,
    Retrieved,
    RetrieverCache,
    RetrieverSettings,
    finished,
    name_of,
)

dispatcher = get_dispatcher(__name__)

QUESTION_FIELDS = frozenset({"query_str", "custom_embedding_strs", "embedding"})
"""Of a query bundle; its other fields are part of the key."""


class QueryCacheEvent(BaseEvent):
    """The result of one question's lookup.

    - ``distance``: Of the nearest question in the retriever's metric; None where none is cached.
    - ``lookup_us``: Microseconds of the lookup.
    - ``note``: Why nothing could be looked up.
    - ``refused``: Why a near enough question was searched all the same.
    """

    hit: bool
    distance: float | None
    lookup_us: float
    note: str | None = None
    refused: str | None = None

    @classmethod
    def class_name(cls) -> str:
        """Name under which instrumentation shows the event."""
        return "QueryCacheEvent"


class RagCacheRetriever(BaseRetriever):
    """Wraps any LlamaIndex retriever; a question near enough to an earlier one is not searched.

    The nodes' bare texts are registered with the engine, so that the model finds them in the prompt
    although query engines put metadata before them. A hit gives copies, with the scores of their search.

    A result is found again only for the same namespace and fields of the wrapped retriever. What your own
    classes and functions find is not cached unless ``partition``, or their method ``cache_key_parts()``,
    names what counts. Changes of indexes and stores through their methods are seen; call
    ``query_cache.clear()`` after others. ``rag.forget`` drops results that name a forgotten text.
    ``aretrieve`` searches a retriever that has no ``_aretrieve`` of its own in a thread.

    Parameters
    ----------
    retriever : BaseRetriever
        Is asked on a miss.
    embed_model : BaseEmbedding, optional
        Embeds the question for the lookup, unless the query bundle has an embedding;
        ``Settings.embed_model`` by default. Given the wrapped retriever's own, the question is embedded once.
    callback_manager : CallbackManager, optional
        As for every LlamaIndex retriever.
    **settings
        See :class:`ragcachekit.RetrieverSettings`; ``partition`` is called with the query bundle.

    Raises
    ------
    TypeError, ValueError
        For something that is no retriever, or bad cache settings.
    """

    def __init__(
        self,
        retriever: BaseRetriever,
        *,
        embed_model: BaseEmbedding | None = None,
        callback_manager: CallbackManager | None = None,
        **settings: Unpack[RetrieverSettings],
    ) -> None:
        if not isinstance(retriever, BaseRetriever):
            raise TypeError(f"expected a LlamaIndex retriever, got {type(retriever).__name__}")
        refuse_cache(settings)
        self._custom = settings.get("partition")
        self._exact = settings.get("tolerance", 0) == 0
        given: Any = dict(settings)
        namespace = given.pop("namespace", None)
        index, store = own_index_of(retriever), getattr(retriever, "_vector_store", None)
        self.query_cache = RetrieverCache(LLAMA_INDEX, retriever=retriever, store=store, index=index, **given)
        super().__init__(callback_manager=callback_manager)
        self._retriever = retriever
        self._embed_model = embed_model or Settings.embed_model
        self._namespace = self.query_cache.namespace_of(namespace)
        self._on_stage: Callable[[tuple[NodeWithScore, ...] | None], object] | None = None
        if self._custom is None and is_by_embedding(retriever, self._embed_model):
            self.query_cache.follow(retriever, lambda: self._namespace, self._nearest)

    @classmethod
    def from_nodes(
        cls,
        nodes: Sequence[BaseNode],
        embed_model: BaseEmbedding | None = None,
        *,
        index: str = "faiss-flat",
        k: int = DEFAULT_SIMILARITY_TOP_K,
        index_metric: str = "cosine",
        index_options: dict[str, Any] | None = None,
        **settings: Unpack[RetrieverSettings],
    ) -> Self:
        """A retriever over an index of its own; see :class:`RagCacheVectorStore` for its arguments.

        With a ``path``, nodes that are there already are not embedded again, and an empty list opens
        what is there. ``retriever.index`` inserts and deletes. Results are put in order anew for each
        question, and found again until the index changes, with a ``path`` by later processes, too.
        """
        model, path = embed_model or Settings.embed_model, settings.pop("path", None)
        store = RagCacheVectorStore(
            index=index, path=path, metric=index_metric, embedder=name_of(model), **(index_options or {})
        )
        context = StorageContext.from_defaults(vector_store=store)
        over = VectorStoreIndex([], storage_context=context, embed_model=model)
        settings["path"] = None if path is None else Path(path) / "questions"
        retriever = cls(over.as_retriever(similarity_top_k=k), embed_model=model, **settings)
        if changed := store.changed(nodes):
            over.insert_nodes(changed)
        return retriever

    @property
    def index(self) -> VectorStoreIndex | None:
        """The index that is searched, if a vector index's own retriever is wrapped."""
        found = getattr(self._retriever, "_index", None)
        return found if isinstance(found, VectorStoreIndex) else None

    def watched(self, on_stage: Callable[[tuple[NodeWithScore, ...] | None], object]) -> Self:
        """A copy that calls ``on_stage`` as described in :class:`ragcachekit.retrieval.plumbing.Call`."""
        retriever = copy(self)
        retriever._on_stage = on_stage
        return retriever

    def cache_key_parts(self) -> tuple[object, ...]:
        """What decides about results where this retriever is part of another one that is cached."""
        order = self.query_cache.order
        return self._retriever, self._embed_model, self._namespace, self._exact, self._custom, order

    def _nearest(self, text: str, most: int) -> list[NodeWithScore]:
        wider: Any = copy(self._retriever)
        wider.similarity_top_k = most
        return wider._retrieve(QueryBundle(text, embedding=self._embed_model.get_text_embedding(text)))  # type: ignore[no-any-return]

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return _handed_out(*finished(self.query_cache.retrieve(self._call(query_bundle, is_async=False))))

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return _handed_out(*await self.query_cache.retrieve(self._call(query_bundle, is_async=True)))

    def _call(self, bundle: QueryBundle, is_async: bool) -> Call[NodeWithScore]:
        inner, model = self._retriever, self._embed_model
        own = None if any(_others(bundle).values()) else own_search(inner, model)
        embed = model.aget_agg_embedding_from_queries if is_async else model.get_agg_embedding_from_queries
        search: Any = inner.aretrieve if is_async else inner.retrieve
        if is_async and type(inner)._aretrieve is BaseRetriever._aretrieve:  # calls _retrieve in the loop
            search = partial(asyncio.to_thread, inner.retrieve)
        return Call(
            self._namespace,
            # Near questions are compared by the strings that are embedded instead of the question, and by it.
            "\n".join(dict.fromkeys([*(bundle.custom_embedding_strs or ()), bundle.query_str])),
            lambda: self._partition(bundle, own),
            lambda: embed(bundle.embedding_strs) if bundle.embedding is None else bundle.embedding,
            lambda embedding: search(self._inner_bundle(bundle, embedding)),
            own,
            asyncio.to_thread if is_async else None,
            self._on_stage,
        )

    def _inner_bundle(self, bundle: QueryBundle, embedding: Any) -> QueryBundle:
        # A copy: VectorIndexRetriever writes into the bundle. The embedding goes along only where it can
        # be used and the wrapped retriever would compute the very same.
        inner = copy(bundle)
        if embedding is not None and getattr(self._retriever, "_embed_model", None) is self._embed_model:
            inner.embedding = embedding
        return inner

    def _partition(self, bundle: QueryBundle, own: OwnSearch | None) -> Partition | None:
        """What the question may use of the query cache, read at every call; None if nothing may be cached."""
        if own is not None:
            filters: Any = getattr(self._retriever, "_filters", None)
            k, arguments = own.k, filters and filters.model_dump(mode="json")
        else:
            k, asked = 1, None
            if self._exact and not is_by_embedding(self._retriever, self._embed_model):
                asked = (bundle.query_str, bundle.custom_embedding_strs)
            arguments = (_others(bundle), self._embed_model, asked)
        return self.query_cache.partition(
            self._namespace, k, self._retriever, arguments, own=own, question=(bundle,)
        )


def _handed_out(
    found: tuple[NodeWithScore, ...], result: Retrieved[NodeWithScore] | None
) -> list[NodeWithScore]:
    """Copies of the nodes, after an event of the lookup."""
    if result is None:
        return list(found)
    names = ("hit", "distance", "lookup_us", "note", "refused")
    dispatcher.event(QueryCacheEvent(**{name: getattr(result, name) for name in names}))
    return [copied(item) for item in found]


def _others(bundle: QueryBundle) -> dict[str, object]:
    return {name: one for name, one in vars(bundle).items() if name not in QUESTION_FIELDS}


def copied(item: NodeWithScore) -> NodeWithScore:
    """A copy; a query engine that the node points to is shared."""
    target = getattr(item.node, "obj", None)
    try:
        node = deepcopy(item.node, {id(target): target})
    except Exception:  # metadata with a lock, a client: whoever put it there shares it
        node = item.node.model_copy(update={"metadata": dict(item.node.metadata)})
    return NodeWithScore(node=node, score=item.score)
