"""The query cache of one retriever: what the retrievers of all frameworks share."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, TypedDict, TypeVar

import numpy as np

from ragcachekit.query.adaptive import AdaptiveTolerance
from ragcachekit.query.base import Partition
from ragcachekit.query.lookups import Lookup, Retrieved
from ragcachekit.query.partition.partitioner import Partitioner
from ragcachekit.query.partition.rules import KeyRules
from ragcachekit.query.proximity import ProximityCache
from ragcachekit.query.retrievers.candidates import (
    OwnSearch,
)
from ragcachekit.query.retrievers.embedding_cache import EmbeddingCache
from ragcachekit.query.retrievers.following import FollowingCache

log = logging.getLogger(__name__)

Document = TypeVar("Document")

_MODEL_SETTINGS = (
    *(
        "model_name",
        "model",
        "model_id",
        "deployment",
        "repo_id",
        "dimensions",
        "truncate_dim",
        "encode_kwargs",
    ),
    *("normalize", "query_instruction", "text_instruction", "embed_instruction", "task_type", "max_length"),
)
"""Attributes of embedding models, in both frameworks, that name the model or change its vectors."""
_ENGINE = ("register", "prefetch", "add_query_cache")


class RetrieverSettings(TypedDict, total=False):
    """Settings of a caching retriever.

    Attributes
    ----------
    cache : RagCache or None
        The engine to register chunks with.
    namespace : str or None
        Tenant and corpus; None for the engine's own, ``"default"`` without one.
    tolerance : float
        Greatest distance of a hit in the metric's unit; 0 (the default) is an equal vector, and an equal
        question where the search does not go by vector. Calibrate anything else.
    capacity, metric, eviction, ttl
        As for :class:`ragcachekit.ProximityCache`; 1,000 questions by default. Without a ``metric`` it is
        that of the wrapped store where that says one, else ``cosine``.
    guard : bool
        With a tolerance, refuse hits on questions that differ in a negation, a number, a name, or in who
        does what to whom; on by default.
    version : callable or None
        Gives a value that changes whenever somebody else changes the index; asked at every question.
    target_recall : float or None
        With a tolerance: let a tenth of the hits be searched again in the background, and shrink the
        tolerance where they return less than this share of what the search finds. For searches by vector.
    embedding_cache : int or None
        Questions whose embeddings are kept, so that exact repetitions are not embedded again; as many as
        ``capacity`` by default, 0 for none.
    partition : callable or None
        Called with the question (and in LangChain the config of its run): what results depend on beside
        the namespace and the search arguments, such as a user's id. None from it: do not cache. It
        replaces the wrapped retriever's state and the run's configurable values; changes of the
        retriever's indexes still count.
    """

    cache: Any
    namespace: str | None
    tolerance: float
    capacity: int
    metric: str | None
    eviction: str
    ttl: float | None
    guard: bool
    version: Callable[[], object] | None
    target_recall: float | None
    embedding_cache: int | None
    partition: Callable[..., object] | None


class RetrieverCache(FollowingCache[Document]):
    """A :class:`CachedRetrieval` with the partitions of one retriever, registered with the engine.

    ``rules`` are those of the retriever's framework, ``text`` gives the text of a document; for the rest see
    :class:`RetrieverSettings`. ``folder`` keeps the results of an index of one's own, and embeddings, over a
    restart. ValueError or TypeError for bad settings.
    """

    def __init__(
        self,
        rules: KeyRules,
        text: Callable[[Document], str],
        *,
        cache: Any = None,
        tolerance: float = 0.0,
        capacity: int = 1000,
        metric: str | None = None,
        eviction: str = "fifo",
        ttl: float | None = None,
        guard: bool = True,
        version: Callable[[], object] | None = None,
        target_recall: float | None = None,
        embedding_cache: int | None = None,
        partition: Callable[..., object] | None = None,
        folder: Path | None = None,
    ) -> None:
        if cache is not None and not all(hasattr(cache, name) for name in _ENGINE):
            raise TypeError(f"RagCacheRetriever needs cache=RagCache(...) or None, got {cache!r}")
        keys = ProximityCache(capacity, tolerance, metric or "cosine", eviction, ttl=ttl)
        adaptive = None if target_recall is None else AdaptiveTolerance(target_recall)
        if adaptive is not None:
            weakref.finalize(self, adaptive.close)
        super().__init__(keys, text, guard, folder, adaptive)
        self._embedded = capacity if embedding_cache is None else embedding_cache
        self._embeddings: tuple[object, EmbeddingCache] | None = None
        self.partitioner = Partitioner(rules, partition, version)
        if cache is not None:
            cache.add_query_cache(self)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            "a caching retriever holds locks and callbacks, and cannot be pickled or copied deeply: wrap the "
            "retriever again in each process"
        )

    @staticmethod
    def namespace_of(engine: Any, namespace: str | None) -> str:
        """Tenant and corpus of a retriever's results."""
        return namespace or getattr(engine, "namespace", None) or "default"

    def ask(
        self,
        embedding: Sequence[float] | None,
        partition: Partition | None,
        question: str | None = None,
        own: OwnSearch[Document] | None = None,
    ) -> Lookup[Document] | None:
        """Look a question up; None if nothing may be cached, or if there is no embedding."""
        if partition is None or embedding is None:
            return None
        self.refresh()
        with np.errstate(over="ignore"):  # too large for float32: infinite, which the lookup refuses
            try:
                row = np.asarray(embedding, np.float32)  # once for both halves
                k = None if own is None else own.wanted
                asked = self.lookup(row, partition, question=question, k=k)
            except (TypeError, ValueError):
                self.not_embedded()
                return None
        if own is not None and asked.result.hit:
            found: Any = asked.result.documents
            chosen = own.nearest(found, row)
            result = replace(asked.result, documents=own.documents(chosen))
            return asked._replace(result=result, ids=tuple(record.id for record, _ in chosen))
        return asked

    def embed(self, embedder: object, text: str, embed: Callable[[str], Any]) -> Any:
        """The embedding of a question, by ``embed(text)`` unless it is cached; None if that fails."""
        try:
            cache = self._embeddings_of(embedder)
            return embed(text) if cache is None else cache.embed(text, embed).tolist()
        except Exception:
            self.not_embedded()
            return None

    async def aembed(self, embedder: object, text: str, embed: Callable[[str], Awaitable[Any]]) -> Any:
        """:meth:`embed` with a coroutine function."""
        try:
            cache = self._embeddings_of(embedder)
            return await embed(text) if cache is None else (await cache.aembed(text, embed)).tolist()
        except Exception:
            self.not_embedded()
            return None

    def _embeddings_of(self, embedder: object) -> EmbeddingCache | None:
        if not self._embedded:
            return None
        if self._embeddings is None or self._embeddings[0] is not embedder:
            self._embeddings = embedder, EmbeddingCache(name_of(embedder), self._embedded, self._store)
        return self._embeddings[1]

    def not_embedded(self) -> None:
        """Log the present exception: the question has no embedding."""
        log.warning("embedding the question failed, searching without the query cache", exc_info=True)

    def answer(
        self, asked: Lookup[Document], found: Iterable[Document], partition: Partition | None
    ) -> Retrieved[Document]:
        """Insert what a search found, if the partition is the same after it."""
        documents = tuple(found)
        if self.partitioner.is_unchanged(asked.partition, partition):
            named = self._text or str
            return self.insert(asked, [(named(document), document) for document in documents])
        if self.observers:
            self.observers.searched(asked.seen(len(documents)))
        return replace(asked.result, documents=documents)

    def register(
        self,
        engine: Any,
        namespace: str,
        texts: Sequence[str],
        epoch: int,
        sources: Sequence[str | None] = (),
    ) -> None:
        """Register and prefetch texts, unless something was forgotten since ``epoch``.

        ``sources`` names the document of each text, where the framework knows it. A failing engine costs
        their reuse, not the answer.
        """
        if engine is None or not texts:
            return
        if self._order is not None:
            self._order.update()

        def register() -> None:
            known = {"sources": sources} if any(sources) else {}
            engine.register(texts, namespace=namespace, **known)
            engine.prefetch(texts, namespace=namespace)  # loads while the prompt is made

        try:
            self.while_current(epoch, register)
        except Exception:
            log.warning("could not register the retrieved chunks with the engine", exc_info=True)


def name_of(embedder: object) -> str:
    """Identity of an embedding model, as far as its class and the name of its model tell."""
    named = {name: getattr(embedder, name, None) for name in _MODEL_SETTINGS}
    shown = ",".join(
        f"{name}={value}" for name, value in named.items() if isinstance(value, str | int | dict)
    )
    return f"{type(embedder).__module__}.{type(embedder).__qualname__}:{shown}"
