"""A LlamaIndex retriever that answers near-identical questions from a query cache."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.callbacks import CallbackManager
from llama_index.core.instrumentation import get_dispatcher  # type: ignore[attr-defined]
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import BaseNode, MetadataMode, NodeWithScore, QueryBundle
from llama_index.core.settings import Settings

from ragcachekit import CachedRetrieval, Partition, ProximityCache

logger = logging.getLogger(__name__)
dispatcher = get_dispatcher(__name__)

SETTINGS = frozenset({"filters", "node_ids", "doc_ids", "kwargs"})
"""Attributes (less their underscore) that decide what a vector index retriever finds, beside its scalars."""

ENGINE = ("register", "prefetch")
"""What is called of the engine here."""


class QueryCacheEvent(BaseEvent):
    """What the query cache said to one question."""

    hit: bool
    distance: float | None
    lookup_us: float

    @classmethod
    def class_name(cls) -> str:
        """Name under which instrumentation shows the event."""
        return "QueryCacheEvent"


class RagCacheRetriever(BaseRetriever):
    """Wraps any LlamaIndex retriever; a question near enough to an earlier one is not searched.

    The nodes' bare texts are registered with the engine, so that the model finds them in the prompt
    although query engines put metadata before them, and what lies on disk begins to load. A hit gives
    copies, whose score is None: a cached score belongs to another question (a
    ``SimilarityPostprocessor`` with a cutoff drops nodes without one). Call :meth:`clear` when the index
    changes.

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
        Greatest distance of a hit in the metric's unit; 0 is an equal vector. Calibrate anything else.
    capacity : int
        Questions kept.
    metric : {"cosine", "l2", "ip"}
        Distance between questions.
    eviction : {"fifo", "lru"}
        Which question leaves first.
    namespace : str, optional
        Tenant and corpus; the engine's own by default, ``"default"`` without one.
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
        callback_manager: CallbackManager | None = None,
    ) -> None:
        if not isinstance(retriever, BaseRetriever):
            raise TypeError(f"expected a LlamaIndex retriever, got {type(retriever).__name__}")
        if cache is not None and not all(hasattr(cache, name) for name in ENGINE):
            raise TypeError(f"{type(self).__name__} needs cache=RagCache(...) or None, got {cache!r}")
        super().__init__(callback_manager=callback_manager)
        self._retriever = retriever
        self._embed_model = embed_model or Settings.embed_model
        self._cache = cache
        self._namespace = namespace
        queries = ProximityCache(capacity, tolerance, metric, eviction)
        self._retrieval: CachedRetrieval[BaseNode] = CachedRetrieval(queries)
        self._ids = itertools.count()

    def clear(self) -> int:
        """Forget all cached questions, of all namespaces; returns their number."""
        return self._retrieval.clear()

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        embedding, place = query_bundle.embedding, self._partition(query_bundle)
        if embedding is None:
            try:
                embedding = self._embed_model.get_agg_embedding_from_queries(query_bundle.embedding_strs)
            except Exception:
                _warn_not_embedded()
        if embedding is None or place is None:
            return self._register(self._retriever.retrieve(replace(query_bundle)))
        inner, found = self._inner_bundle(query_bundle, embedding), list[NodeWithScore]()

        def search() -> list[tuple[int, BaseNode]]:
            found.extend(self._retriever.retrieve(inner))
            return self._keep(found)

        return self._finish(self._retrieval.get(_vector(embedding), place, search), found)

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        embedding, place = query_bundle.embedding, self._partition(query_bundle)
        if embedding is None:
            strings = query_bundle.embedding_strs
            try:
                embedding = await self._embed_model.aget_agg_embedding_from_queries(strings)
            except Exception:
                _warn_not_embedded()
        if embedding is None or place is None:
            return self._register(await self._retriever.aretrieve(replace(query_bundle)))
        inner, found = self._inner_bundle(query_bundle, embedding), list[NodeWithScore]()

        async def search() -> list[tuple[int, BaseNode]]:
            found.extend(await self._retriever.aretrieve(inner))
            return self._keep(found)

        return self._finish(await self._retrieval.aget(_vector(embedding), place, search), found)

    def _inner_bundle(self, bundle: QueryBundle, embedding: list[float]) -> QueryBundle:
        # A copy: VectorIndexRetriever writes into the bundle. The embedding goes along only where the
        # wrapped retriever would compute the very same.
        own = getattr(self._retriever, "_embed_model", None) is self._embed_model
        return replace(bundle, embedding=embedding) if own else replace(bundle)

    def _partition(self, bundle: QueryBundle) -> Partition | None:
        """Namespace and settings of the wrapped retriever, read at every call: they can be changed."""
        settings = {
            name: value
            for name, value in vars(self._retriever).items()
            if isinstance(value, str | int | float | bool) or name.strip("_") in SETTINGS
        }
        settings["image_path"] = bundle.image_path
        k = getattr(self._retriever, "similarity_top_k", 1)
        try:
            return Partition.of(self._space(), k, search_kwargs=settings)
        except TypeError as error:  # a setting that can neither be compared nor taken apart
            logger.info("searching without the query cache: %s", error)
            return None

    def _space(self) -> str:
        return self._namespace or getattr(self._cache, "namespace", None) or "default"

    def _keep(self, found: list[NodeWithScore]) -> list[tuple[int, BaseNode]]:
        # Numbered, not by node_id: metadata may belong to one question (scores, highlights).
        return [(next(self._ids), _copy(item.node)) for item in found]

    def _finish(self, result: Any, found: list[NodeWithScore]) -> list[NodeWithScore]:
        dispatcher.event(
            QueryCacheEvent(hit=result.hit, distance=result.distance, lookup_us=result.lookup_us)
        )
        if result.hit:
            found = [NodeWithScore(node=_copy(node), score=None) for node in result.documents]
        return self._register(found)

    def _register(self, found: list[NodeWithScore]) -> list[NodeWithScore]:
        texts = _texts(item.node for item in found)
        if self._cache is not None and texts:
            try:
                self._cache.register(texts, namespace=self._space())
                self._cache.prefetch(texts, namespace=self._space())  # loads while the prompt is made
            except Exception:  # the nodes are found; without registration they are only not reused
                logger.warning("could not register the retrieved chunks with the engine", exc_info=True)
        return found


def _texts(nodes: Iterable[BaseNode]) -> list[str]:
    texts = (node.get_content(metadata_mode=MetadataMode.NONE) for node in nodes)
    return [text for text in texts if text.strip()]


def _copy(node: BaseNode) -> BaseNode:
    # An index node may point to a whole query engine, which is shared, not copied.
    target = getattr(node, "obj", None)
    return deepcopy(node, {id(target): target})


def _vector(embedding: list[float]) -> Any:
    with np.errstate(over="ignore"):  # too large for float32: infinite, which the lookup refuses
        return np.asarray(embedding, np.float32)  # once: lookup and insert both need it


def _warn_not_embedded() -> None:
    logger.warning("embedding the question failed, searching without the query cache", exc_info=True)
