"""A LlamaIndex retriever that answers near-identical questions from a query cache."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Awaitable, Callable
from copy import copy
from typing import Any, TypeAlias

import numpy as np
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.callbacks import CallbackManager
from llama_index.core.instrumentation import get_dispatcher  # type: ignore[attr-defined]
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import BaseNode, MetadataMode, NodeWithScore, QueryBundle
from llama_index.core.settings import Settings

from llama_index_ragcachekit.partitions import RULES, CustomPartition, is_by_embedding
from llama_index_ragcachekit.scores import ScoredNode, scored_nodes
from ragcachekit import CachedRetrieval, Partition, Partitioner, ProximityCache, Retrieved

logger = logging.getLogger(__name__)
dispatcher = get_dispatcher(__name__)

ENGINE = ("register", "prefetch", "add_query_cache")
"""What is called of the engine here."""

QUESTION_FIELDS = frozenset({"query_str", "custom_embedding_strs", "embedding"})
"""Of a query bundle; its other fields are part of the key."""

Numbered: TypeAlias = list[tuple[int, ScoredNode]]


class QueryCacheEvent(BaseEvent):
    """What the query cache said to one question."""

    hit: bool
    distance: float | None
    lookup_us: float
    note: str | None = None

    @classmethod
    def class_name(cls) -> str:
        """Name under which instrumentation shows the event."""
        return "QueryCacheEvent"


class RagCacheRetriever(BaseRetriever):
    """Wraps any LlamaIndex retriever; a question near enough to an earlier one is not searched.

    The nodes' bare texts are registered with the engine, so that the model finds them in the prompt
    although query engines put metadata before them, and what lies on disk begins to load. A hit gives
    copies. Their scores are those of the search where the question's embedding is the same. For a near
    question they are computed from the nodes' vectors where the vector store gives these; else the old
    ones stay, and the nodes' metadata says so under ``ragcachekit_score``.

    A result is found again only for the same namespace and the same state of the wrapped retriever (its
    attributes and those of what it wraps, at any depth). Classes and functions of your own may depend on
    anything: what they find is not cached unless ``partition`` names what counts, or the class does so in a
    method ``cache_key_parts()``. The same holds for what has too much content to be compared at every
    question. The log says so once.

    Changes of indexes, vector stores and document stores that come through their methods (``insert``,
    ``delete_ref_doc``, ``refresh``, ``add``, ...) are seen. Call :meth:`clear` after others, such as those
    of another process. ``cache.forget`` drops results that name a forgotten text.

    Parameters
    ----------
    retriever : BaseRetriever
        What is asked on a miss.
    embed_model : BaseEmbedding, optional
        Embeds the question for the lookup; ``Settings.embed_model`` by default. An embedding that the
        query bundle brings is used instead. If it is the wrapped retriever's own, the question is
        embedded once.
    cache : RagCache, optional
        The engine to register chunks with.
    tolerance : float
        Greatest distance of a hit in the metric's unit; 0 is an equal vector (and an equal question,
        where the search does not go by the embedding alone). Calibrate anything else.
    capacity : int
        Questions kept.
    metric : {"cosine", "l2", "ip"}
        Distance between questions.
    eviction : {"fifo", "lru"}
        Which question leaves first.
    namespace : str, optional
        Tenant and corpus; the engine's own by default, ``"default"`` without one.
    partition : callable, optional
        ``partition(query_bundle)`` gives what results depend on beside the namespace (a user's id,
        groups); None from it: do not cache. The wrapped retriever's state counts no more, changes of its
        indexes still do.
    callback_manager : CallbackManager, optional
        As for every LlamaIndex retriever.

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
        cache: Any = None,
        tolerance: float = 0.0,
        capacity: int = 1000,
        metric: str = "cosine",
        eviction: str = "fifo",
        namespace: str | None = None,
        partition: CustomPartition | None = None,
        callback_manager: CallbackManager | None = None,
    ) -> None:
        if not isinstance(retriever, BaseRetriever):
            raise TypeError(f"expected a LlamaIndex retriever, got {type(retriever).__name__}")
        if cache is not None and not all(hasattr(cache, name) for name in ENGINE):
            raise TypeError(f"{type(self).__name__} needs cache=RagCache(...) or None, got {cache!r}")
        if partition is not None and not callable(partition):
            raise TypeError(f"partition= must be a function of a QueryBundle, got {partition!r}")
        super().__init__(callback_manager=callback_manager)
        self._retriever = retriever
        self._embed_model = embed_model or Settings.embed_model
        self._cache = cache
        self._namespace = namespace
        self._custom = partition
        self._exact = tolerance == 0
        queries = ProximityCache(capacity, tolerance, metric, eviction)
        self._retrieval: CachedRetrieval[ScoredNode] = CachedRetrieval(queries, text=_kept_text)
        self._partitioner = Partitioner(RULES, custom=partition)
        self._ids = itertools.count()
        if cache is not None:
            cache.add_query_cache(self._retrieval)

    def clear(self) -> int:
        """Forget all cached questions, of all namespaces; returns their number."""
        return self._retrieval.clear()

    def cache_key_parts(self) -> tuple[object, ...]:
        """What decides about results where this retriever is part of another one that is cached."""
        return self._retriever, self._embed_model, self._space(), self._exact, self._custom

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        epoch, place, vector = self._retrieval.epoch, self._partition(query_bundle), None
        try:
            embedding = query_bundle.embedding
            if embedding is None:
                embedding = self._embed_model.get_agg_embedding_from_queries(query_bundle.embedding_strs)
            vector = _vector(embedding)
        except Exception:
            _warn_not_embedded()
        if vector is None or place is None:
            return self._register(self._retriever.retrieve(copy(query_bundle)), epoch)
        found = list[NodeWithScore]()

        def search(bundle: QueryBundle) -> Callable[[], Numbered]:
            def ask() -> Numbered:
                found.extend(self._retriever.retrieve(bundle))
                return self._keep(found, vector)

            return ask

        inner = search(self._inner_bundle(query_bundle, embedding))
        result = self._retrieval.get(
            vector, place, inner, search(copy(query_bundle)), lambda: self._is_in(place, query_bundle)
        )
        return self._finish(result, found, vector, epoch)

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        epoch, place, vector = self._retrieval.epoch, self._partition(query_bundle), None
        try:
            embedding = query_bundle.embedding
            if embedding is None:
                strings = query_bundle.embedding_strs
                embedding = await self._embed_model.aget_agg_embedding_from_queries(strings)
            vector = _vector(embedding)
        except Exception:
            _warn_not_embedded()
        if vector is None or place is None:
            return self._register(await self._retriever.aretrieve(copy(query_bundle)), epoch)
        found = list[NodeWithScore]()

        def search(bundle: QueryBundle) -> Callable[[], Awaitable[Numbered]]:
            async def ask() -> Numbered:
                found.extend(await self._retriever.aretrieve(bundle))
                return self._keep(found, vector)

            return ask

        inner = search(self._inner_bundle(query_bundle, embedding))
        result = await self._retrieval.aget(
            vector, place, inner, search(copy(query_bundle)), lambda: self._is_in(place, query_bundle)
        )
        return self._finish(result, found, vector, epoch)

    def _inner_bundle(self, bundle: QueryBundle, embedding: list[float] | None) -> QueryBundle:
        # A copy: VectorIndexRetriever writes into the bundle. The embedding goes along only where the
        # wrapped retriever would compute the very same.
        own = getattr(self._retriever, "_embed_model", None) is self._embed_model
        inner = copy(bundle)
        if own:
            inner.embedding = embedding
        return inner

    def _partition(self, bundle: QueryBundle) -> Partition | None:
        """What the question may use of the query cache, read at every call; None if nothing may be cached."""
        asked: object = None
        if self._exact and not is_by_embedding(self._retriever, self._embed_model):
            asked = (bundle.query_str, bundle.custom_embedding_strs)
        others = {name: one for name, one in vars(bundle).items() if name not in QUESTION_FIELDS}
        arguments = (others, self._embed_model, asked)
        return self._partitioner.partition(self._space(), 1, self._retriever, arguments, question=(bundle,))

    def _is_in(self, place: Partition, bundle: QueryBundle) -> bool:
        """Whether the partition is the same after the search."""
        return self._partitioner.is_unchanged(place, self._partition(bundle))

    def _space(self) -> str:
        return self._namespace or getattr(self._cache, "namespace", None) or "default"

    def _keep(self, found: list[NodeWithScore], vector: Any) -> Numbered:
        # Numbered, not by node_id: metadata may belong to one question (scores, highlights).
        vector_of = None if self._exact else self._vector_of
        return [(next(self._ids), kept) for kept in scored_nodes(found, vector, vector_of)]

    def _vector_of(self, node: BaseNode) -> Any:
        """The node's embedding, if it has it or the wrapped retriever's vector store gives it."""
        if node.embedding is not None:
            return node.embedding
        get = getattr(getattr(self._retriever, "_vector_store", None), "get", None)
        try:
            return get(node.node_id) if get is not None else None
        except Exception:  # not every store keeps them, and only a score is lost
            return None

    def _finish(
        self,
        result: Retrieved[ScoredNode],
        found: list[NodeWithScore],
        vector: Any,
        epoch: int,
    ) -> list[NodeWithScore]:
        dispatcher.event(
            QueryCacheEvent(
                hit=result.hit, distance=result.distance, lookup_us=result.lookup_us, note=result.note
            )
        )
        if not result.hit:
            return self._register(found, epoch)
        exact = result.distance == 0
        kept = [item.exact() if exact else item.near(vector) for item in result.documents]
        return self._register(kept, epoch)

    def _register(self, found: list[NodeWithScore], epoch: int) -> list[NodeWithScore]:
        texts = [text for text in (_text(item.node) for item in found) if text.strip()]
        if self._cache is not None and texts:

            def register() -> None:
                self._cache.register(texts, namespace=self._space())
                self._cache.prefetch(texts, namespace=self._space())  # loads while the prompt is made

            try:
                self._retrieval.while_current(epoch, register)  # or one of them may be forgotten
            except Exception:  # the nodes are found; without registration they are only not reused
                logger.warning("could not register the retrieved chunks with the engine", exc_info=True)
        return found


def _text(node: BaseNode) -> str:
    return node.get_content(metadata_mode=MetadataMode.NONE)


def _kept_text(kept: ScoredNode) -> str:
    return _text(kept.node)


def _vector(embedding: list[float]) -> Any:
    with np.errstate(over="ignore"):  # too large for float32: infinite, which the lookup refuses
        return np.asarray(embedding, np.float32)  # once: lookup and insert both need it


def _warn_not_embedded() -> None:
    logger.warning("embedding the question failed, searching without the query cache", exc_info=True)
