"""A LlamaIndex retriever that answers near-identical questions from a query cache."""

from __future__ import annotations

from copy import copy, deepcopy
from typing import Any, Unpack

from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.callbacks import CallbackManager
from llama_index.core.instrumentation import get_dispatcher  # type: ignore[attr-defined]
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle
from llama_index.core.settings import Settings

from llama_index_ragcachekit.partitions import RULES, is_by_embedding
from ragcachekit import Lookup, Partition, RetrieverCache, RetrieverSettings

dispatcher = get_dispatcher(__name__)

SCORE_NOTE = "ragcachekit_score"
"""Metadata key of a node whose score is that of the cached question; hidden from model and embedder."""

QUESTION_FIELDS = frozenset({"query_str", "custom_embedding_strs", "embedding"})
"""Of a query bundle; its other fields are part of the key."""


class QueryCacheEvent(BaseEvent):
    """The result of one question's lookup."""

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
    although query engines put metadata before them. A hit gives copies, with the scores of their search; for
    a near question, the nodes' metadata shows that under ``ragcachekit_score``.

    A result is found again only for the same namespace and the same state of the wrapped retriever (its
    attributes and those of what it wraps, at any depth). Classes and functions of your own may depend on
    anything: what they find is not cached unless ``partition`` names what counts, or the class does so in a
    method ``cache_key_parts()``. The same holds for what is too large to be compared at every question.
    This is logged once.

    Changes of indexes and stores through their methods (``insert``, ``delete_ref_doc``, ``refresh``, ``add``,
    ...) are seen. Call :meth:`clear` after others. ``cache.forget`` drops results that name a forgotten text.

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
        self._custom = settings.get("partition")
        if self._custom is not None and not callable(self._custom):
            raise TypeError(f"partition= must be a function of a QueryBundle, got {self._custom!r}")
        self._namespace = settings.get("namespace")
        self._cache = settings.get("cache")
        self._exact = settings.get("tolerance", 0) == 0
        others: Any = {name: value for name, value in settings.items() if name != "namespace"}
        self._retrieval: RetrieverCache[NodeWithScore] = RetrieverCache(RULES, _text, **others)
        super().__init__(callback_manager=callback_manager)
        self._retriever = retriever
        self._embed_model = embed_model or Settings.embed_model

    def clear(self) -> int:
        """Forget all cached questions, of all namespaces; returns their number."""
        return self._retrieval.clear()

    def cache_key_parts(self) -> tuple[object, ...]:
        """What decides about results where this retriever is part of another one that is cached."""
        namespace = self._retrieval.namespace_of(self._cache, self._namespace)
        return self._retriever, self._embed_model, namespace, self._exact, self._custom

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        epoch, place, embedding = self._retrieval.epoch, self._partition(query_bundle), query_bundle.embedding
        if embedding is None:
            try:
                embedding = self._embed_model.get_agg_embedding_from_queries(query_bundle.embedding_strs)
            except Exception:
                self._retrieval.not_embedded()
        asked = self._retrieval.ask(embedding, place)
        found = None
        if asked is None or not asked.result.hit:
            found = self._retriever.retrieve(self._inner_bundle(query_bundle, asked, embedding))
        return self._answer(asked, found, query_bundle, epoch)

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        epoch, place, embedding = self._retrieval.epoch, self._partition(query_bundle), query_bundle.embedding
        if embedding is None:
            try:
                strings = query_bundle.embedding_strs
                embedding = await self._embed_model.aget_agg_embedding_from_queries(strings)
            except Exception:
                self._retrieval.not_embedded()
        asked = self._retrieval.ask(embedding, place)
        found = None
        if asked is None or not asked.result.hit:
            found = await self._retriever.aretrieve(self._inner_bundle(query_bundle, asked, embedding))
        return self._answer(asked, found, query_bundle, epoch)

    def _inner_bundle(
        self, bundle: QueryBundle, asked: Lookup[NodeWithScore] | None, embedding: list[float] | None
    ) -> QueryBundle:
        # A copy: VectorIndexRetriever writes into the bundle. The embedding goes along only where it can
        # be used and the wrapped retriever would compute the very same.
        inner = copy(bundle)
        usable = asked is not None and asked.result.note is None
        if usable and getattr(self._retriever, "_embed_model", None) is self._embed_model:
            inner.embedding = embedding
        return inner

    def _partition(self, bundle: QueryBundle) -> Partition | None:
        """What the question may use of the query cache, read at every call; None if nothing may be cached."""
        asked: object = None
        if self._exact and not is_by_embedding(self._retriever, self._embed_model):
            asked = (bundle.query_str, bundle.custom_embedding_strs)
        others = {name: one for name, one in vars(bundle).items() if name not in QUESTION_FIELDS}
        namespace = self._retrieval.namespace_of(self._cache, self._namespace)
        arguments = (others, self._embed_model, asked)
        return self._retrieval.partitioner.partition(
            namespace, 1, self._retriever, arguments, question=(bundle,)
        )

    def _answer(
        self,
        asked: Lookup[NodeWithScore] | None,
        found: list[NodeWithScore] | None,
        bundle: QueryBundle,
        epoch: int,
    ) -> list[NodeWithScore]:
        """The nodes of a search or a hit, registered with the engine."""
        if asked is not None:
            result = asked.result
            if found is None:
                found = [copied(item, is_near=bool(result.distance)) for item in result.documents]
            else:
                copies = [copied(item) for item in found]
                result = self._retrieval.answer(asked, copies, self._partition(bundle))
            event = QueryCacheEvent(
                hit=result.hit, distance=result.distance, lookup_us=result.lookup_us, note=result.note
            )
            dispatcher.event(event)
        nodes_found = found or []
        texts = [text for item in nodes_found if (text := _text(item)).strip()]
        namespace = self._retrieval.namespace_of(self._cache, self._namespace)
        self._retrieval.register(self._cache, namespace, texts, epoch)
        return nodes_found


def _text(item: NodeWithScore) -> str:
    return item.node.get_content(metadata_mode=MetadataMode.NONE)


def copied(item: NodeWithScore, is_near: bool = False) -> NodeWithScore:
    """A copy, marked if its score is of another question; a query engine that it points to is shared."""
    target = getattr(item.node, "obj", None)
    try:
        node = deepcopy(item.node, {id(target): target})
    except Exception:  # metadata with a lock, a client: whoever put it there shares it
        node = item.node.model_copy(update={"metadata": dict(item.node.metadata)})
    if is_near and item.score is not None:
        node.metadata[SCORE_NOTE] = "of the cached question"
        node.excluded_llm_metadata_keys.append(SCORE_NOTE)
        node.excluded_embed_metadata_keys.append(SCORE_NOTE)
    return NodeWithScore(node=node, score=item.score)
