"""The query cache of one retriever: what the retrievers of all frameworks share."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypedDict, TypeVar

import numpy as np

from ragcachekit.query.base import Partition
from ragcachekit.query.lookups import Lookup, Retrieved
from ragcachekit.query.partition.partitioner import Partitioner
from ragcachekit.query.partition.rules import KeyRules
from ragcachekit.query.proximity import ProximityCache
from ragcachekit.query.retrieval import CachedRetrieval

log = logging.getLogger(__name__)

Document = TypeVar("Document")

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
    capacity, metric, eviction
        As for :class:`ragcachekit.ProximityCache`; 1,000 questions by default.
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
    metric: str
    eviction: str
    partition: Callable[..., object] | None


class RetrieverCache(CachedRetrieval[Document]):
    """A :class:`CachedRetrieval` with the partitions of one retriever, registered with the engine.

    ``rules`` are those of the retriever's framework, ``text`` gives the text of a document; for the rest see
    :class:`RetrieverSettings`. ValueError or TypeError for bad settings.
    """

    def __init__(
        self,
        rules: KeyRules,
        text: Callable[[Document], str],
        *,
        cache: Any = None,
        tolerance: float = 0.0,
        capacity: int = 1000,
        metric: str = "cosine",
        eviction: str = "fifo",
        partition: Callable[..., object] | None = None,
    ) -> None:
        if cache is not None and not all(hasattr(cache, name) for name in _ENGINE):
            raise TypeError(f"RagCacheRetriever needs cache=RagCache(...) or None, got {cache!r}")
        super().__init__(ProximityCache(capacity, tolerance, metric, eviction), text)
        self.partitioner = Partitioner(rules, partition)
        if cache is not None:
            cache.add_query_cache(self)

    @staticmethod
    def namespace_of(engine: Any, namespace: str | None) -> str:
        """Tenant and corpus of a retriever's results."""
        return namespace or getattr(engine, "namespace", None) or "default"

    def ask(self, embedding: Sequence[float] | None, partition: Partition | None) -> Lookup[Document] | None:
        """Look a question up; None if nothing may be cached, or if there is no embedding."""
        if partition is None or embedding is None:
            return None
        with np.errstate(over="ignore"):  # too large for float32: infinite, which the lookup refuses
            try:
                return self.lookup(np.asarray(embedding, np.float32), partition)  # once for both halves
            except (TypeError, ValueError):
                self.not_embedded()
                return None

    def not_embedded(self) -> None:
        """Log the present exception: the question has no embedding."""
        log.warning("embedding the question failed, searching without the query cache", exc_info=True)

    def answer(
        self, asked: Lookup[Document], found: Iterable[Document], partition: Partition | None
    ) -> Retrieved[Document]:
        """Insert what a search found, if the partition is the same after it."""
        documents = tuple(found)
        if self.partitioner.is_unchanged(asked.partition, partition):
            return self.insert(asked, list(enumerate(documents)))
        return replace(asked.result, documents=documents)

    def register(self, engine: Any, namespace: str, texts: Sequence[str], epoch: int) -> None:
        """Register and prefetch texts, unless something was forgotten since ``epoch``.

        A failing engine costs their reuse, not the answer.
        """
        if engine is None or not texts:
            return

        def register() -> None:
            engine.register(texts, namespace=namespace)
            engine.prefetch(texts, namespace=namespace)  # loads while the prompt is made

        try:
            self.while_current(epoch, register)
        except Exception:
            log.warning("could not register the retrieved chunks with the engine", exc_info=True)
