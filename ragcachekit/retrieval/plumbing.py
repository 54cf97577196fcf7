"""What the retrievers of both integrations share; they import nothing else that is not public.

:meth:`RetrieverCache.retrieve` is the path of a question, for synchronous and asynchronous calls alike: its
partition, its embedding, the lookup, or else the search, whose result is kept if the partition is still the
same; then the texts are registered with the engine.
"""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, NoReturn, TypedDict, TypeVar
from weakref import WeakKeyDictionary

import numpy as np

from ragcachekit.json_store import JsonStore
from ragcachekit.retrieval.cached_retrieval import CachedRetrieval, Lookup, Retrieved
from ragcachekit.retrieval.candidates import Candidate, OwnSearch, from_json, to_json
from ragcachekit.retrieval.document_storage import IndexChange
from ragcachekit.retrieval.documents import DocumentIndex
from ragcachekit.retrieval.near_misses import Guard
from ragcachekit.retrieval.partition import Identity, KeyRules, Partition, Partitioner
from ragcachekit.retrieval.proximity import ProximityCache
from ragcachekit.retrieval.saved import SavedEntries

__all__ = [
    "Answer",
    "Call",
    "KeyRules",
    "OwnSearch",
    "Partition",
    "Retrieved",
    "RetrieverCache",
    "RetrieverSettings",
    "finished",
    "name_of",
]

log = logging.getLogger(__name__)

Document = TypeVar("Document")
T = TypeVar("T")

_MODEL_SETTINGS = (
    *("model_name", "model", "model_id", "deployment", "repo_id", "dimensions", "truncate_dim"),
    *("encode_kwargs", "normalize", "query_instruction", "text_instruction", "embed_instruction"),
)
"""Attributes of embedding models, in both frameworks, that name the model or change its vectors."""
_ENGINE = ("register", "prefetch", "add_query_cache")
_VERSION = "index version"  # up to which its changes were applied


class RetrieverSettings(TypedDict, total=False):
    """Settings of a caching retriever.

    Attributes
    ----------
    cache : RagCache or None
        The engine to register chunks with.
    namespace : str or None
        Tenant and corpus; None for the engine's own, ``"default"`` without one.
    tolerance : float
        Maximum distance of a hit in the metric's unit; 0 (the default) is an equal vector, and an equal
        question where the search does not go by vector. Calibrate anything else.
    capacity, metric, eviction, ttl
        As for :class:`ragcachekit.ProximityCache`; 1,000 questions by default. Without a ``metric`` it is
        that of the wrapped store if that names one, else ``cosine``.
    guard : bool or callable
        With a tolerance, refuse hits on questions that differ in a negation, a number, a name or the order
        of their words; on by default. Or a function of both texts: whether the cached documents may be used.
    version : callable or None
        Gives a value that changes whenever somebody else changes the index; called at every question.
    partition : callable or None
        Called with the question (and in LangChain the config of its run): what results depend on beside
        the namespace and the search arguments, such as a user's id. None from it: do not cache. It
        replaces the wrapped retriever's state and the run's configurable values; changes of the stores in
        the retriever's fields, and of those that it returns itself, still count.
    """

    cache: Any
    namespace: str | None
    tolerance: float
    capacity: int
    metric: str | None
    eviction: str
    ttl: float | None
    guard: bool | Guard
    version: Callable[[], object] | None
    partition: Callable[..., object] | None


@dataclass(frozen=True)
class Call(Generic[Document]):
    """One question to a retriever.

    ``partition`` is called before and after the search. ``embed`` and ``search`` may return awaitables;
    ``search`` gets the embedding, or None where that cannot be used. ``own`` is the search in an index of
    one's own. ``in_thread`` awaits a function in another thread; None in synchronous calls.
    """

    namespace: str
    question: str
    partition: Callable[[], Partition | None]
    embed: Callable[[], Any]
    search: Callable[[Any], Iterable[Document] | Awaitable[Iterable[Document]]]
    own: OwnSearch[Document] | None = None
    in_thread: Callable[..., Awaitable[Any]] | None = None


class Answer(NamedTuple, Generic[Document]):
    """The documents as the cache holds them (hand out copies), and what the lookup gave, if there was one."""

    documents: tuple[Document, ...]
    result: Retrieved[Document] | None


class RetrieverCache(CachedRetrieval[Document]):
    """A :class:`CachedRetrieval` with the partitions of one retriever, registered with the engine.

    ``rules`` are those of the retriever's framework. ``text`` gives the text of a document, ``source`` the
    name of what it is a chunk of. For the rest see :class:`RetrieverSettings`. ``index`` is one's own, which
    is followed; its folder keeps the results. ValueError or TypeError for bad settings.
    """

    def __init__(
        self,
        rules: KeyRules,
        text: Callable[[Document], str],
        source: Callable[[Document], str | None],
        *,
        cache: Any = None,
        tolerance: float = 0.0,
        capacity: int = 1000,
        metric: str | None = None,
        eviction: str = "fifo",
        ttl: float | None = None,
        guard: bool | Guard = True,
        version: Callable[[], object] | None = None,
        partition: Callable[..., object] | None = None,
        index: DocumentIndex | None = None,
    ) -> None:
        if cache is not None and not all(hasattr(cache, name) for name in _ENGINE):
            raise TypeError(f"RagCacheRetriever needs cache=RagCache(...) or None, got {cache!r}")
        metric = metric or ("cosine" if index is None else index.metric)
        keys = ProximityCache(capacity, tolerance, metric, eviction, ttl=ttl)
        path = None if index is None else index.path
        self._store = None if path is None else JsonStore(path / "questions")
        saved = None if self._store is None else SavedEntries(self._store, to_json, from_json)
        super().__init__(keys, _text_of(text), guard=guard, saved=saved)
        self.partitioner = Partitioner(rules, partition, version)
        self._engine, self._document_text, self._source = cache, text, source
        self._is_behind = False  # entries on disk that a change should have dropped
        self._followed: WeakKeyDictionary[DocumentIndex, Hashable] = WeakKeyDictionary()
        if cache is not None:
            cache.add_query_cache(self)
        if index is not None:
            self.follow(index)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            "a caching retriever holds locks and callbacks, and cannot be pickled or copied deeply: wrap the "
            "retriever again in each process"
        )

    def namespace_of(self, namespace: str | None) -> str:
        """Tenant and corpus of the results: what is given, else the engine's, else ``"default"``."""
        return namespace or getattr(self._engine, "namespace", None) or "default"

    async def retrieve(self, call: Call[Document]) -> Answer[Document]:
        """Answer a question from the cache or by its search, and register the texts with the engine."""
        epoch = self.epoch
        partition = await self._aside(call, call.partition)
        embedding = await self._embedding(call)
        lookup, result = None, None
        if partition is not None and embedding is not None:
            lookup = await self._aside(call, self._ask, call, embedding, partition)
        if lookup is None:
            documents = tuple(await _awaited(call.search(None)))
        else:
            result = lookup.result
            if not result.hit and call.own is not None and not result.note:
                work = self._search_own, call, lookup
                result = await call.in_thread(*work) if call.in_thread else work[0](*work[1:])
            elif not result.hit:
                found = await _awaited(call.search(None if result.note else embedding))
                result = self._keep(call, lookup, tuple(found))
            documents = result.documents
        await self._aside(call, self._register, call.namespace, documents, epoch)
        return Answer(documents, result)

    def invalidate_documents(
        self,
        found_by: Callable[[Document], Hashable],
        ids: Iterable[Hashable] | None,
        texts: Iterable[str] | None,
        where: Callable[[Document], bool] | None,
        convert: Callable[[Any, float], Document],
    ) -> int:
        """Forget results with one of these documents; returns how many.

        ``found_by`` gives the id of a document, ``convert`` makes one of what an index of one's own holds.
        Without ``ids``, ``texts`` and ``where`` all results go.
        """
        if ids is None and texts is None and where is None:
            return self.clear()
        named, bare = frozenset(ids or ()), frozenset(text.strip() for text in texts or ())

        def goes(found: Any) -> bool:
            document = convert(found.record, found.distance) if isinstance(found, Candidate) else found
            if found_by(document) in named or self._document_text(document).strip() in bare:
                return True
            return where is not None and where(document)

        return self.invalidate(where=goes)

    def follow(self, index: DocumentIndex) -> Hashable:
        """The name of an index that reports its changes, which drop results from now on.

        Results that hold a deleted or replaced document go, and those that a new one may belong to.
        """
        if index not in self._followed:
            this = weakref.ref(self)

            def changed(change: IndexChange) -> None:
                if (cache := this()) is not None:
                    cache._apply(change)

            weakref.finalize(self, index.on_change(changed))
            self._followed[index] = Identity(index) if index.path is None else str(index.path)
            if self._store is not None and self._store.get(_VERSION) != index.version:
                self._apply(IndexChange(index.version, None, None))  # changed while nobody followed it
        return self._followed[index]

    async def _aside(self, call: Call[Document], work: Callable[..., T], *arguments: Any) -> T:
        """Call in a thread where a file may be read or written, else here."""
        if call.in_thread is not None and self._store is not None:
            result: T = await call.in_thread(work, *arguments)
            return result
        return work(*arguments)

    async def _embedding(self, call: Call[Document]) -> Any:
        try:
            return await _awaited(call.embed())
        except Exception:
            self._not_embedded()
            return None

    def _ask(self, call: Call[Document], embedding: Any, partition: Partition) -> Lookup[Document] | None:
        for index in list(self._followed):
            index.refresh()
        own = call.own
        with np.errstate(over="ignore"):  # too large for float32: infinite, which the lookup refuses
            try:
                row = np.asarray(embedding, np.float32)
                k = None if own is None else own.wanted
                lookup = self.lookup(row, partition, question=call.question, k=k)
            except (TypeError, ValueError):
                self._not_embedded()
                return None
        if own is None or not lookup.result.hit:
            return lookup
        found: Any = lookup.result.documents
        documents = own.documents(own.nearest(found, row))
        return lookup._replace(result=replace(lookup.result, documents=documents))

    def _search_own(self, call: Call[Document], lookup: Lookup[Document]) -> Retrieved[Document]:
        """Search an index of one's own, and keep the candidates."""
        own: Any = call.own
        candidates = own.search(lookup.embedding)
        result = replace(lookup.result, documents=own.documents(own.nearest(candidates, lookup.embedding)))
        if self.partitioner.is_unchanged(lookup.partition, call.partition()):
            pairs: Any = [(one.record.id, one) for one in candidates]
            self.insert(lookup, pairs, radius=own.radius(candidates))
        return result

    def _keep(
        self, call: Call[Document], lookup: Lookup[Document], documents: tuple[Document, ...]
    ) -> Retrieved[Document]:
        """Insert what a search found, if the partition is the same after it."""
        if self.partitioner.is_unchanged(lookup.partition, call.partition()):
            return self.insert(lookup, [(self._document_text(one), one) for one in documents])
        return self.searched(lookup, documents)

    def _register(self, namespace: str, documents: Sequence[Document], epoch: int) -> None:
        """Register and prefetch texts, unless something was forgotten since ``epoch``.

        A failing engine costs their reuse, not the answer.
        """
        pairs = [(text, self._source(one)) for one in documents if (text := self._document_text(one)).strip()]
        if self._engine is None or not pairs:
            return
        texts, sources = [text for text, _ in pairs], [source for _, source in pairs]

        def register() -> None:
            known = {"sources": sources} if any(sources) else {}
            self._engine.register(texts, namespace=namespace, **known)
            self._engine.prefetch(texts, namespace=namespace)  # loads while the prompt is made

        try:
            self.while_current(epoch, register)
        except Exception:
            log.warning("could not register the retrieved chunks with the engine", exc_info=True)

    def _not_embedded(self) -> None:
        log.warning("embedding the question failed, searching without the query cache", exc_info=True)

    def _apply(self, change: IndexChange) -> None:
        """Drop what a change concerns; where the disk fails, all of it now and at the next change."""
        try:
            if self._is_behind or change.gone is None or change.embeddings is None:
                self.clear()
            else:
                self.invalidate(ids=change.gone)
                if len(change.embeddings):  # without rows, everything would be dropped
                    self.invalidate_near(change.embeddings)
            if self._store is not None:
                self._store.put({_VERSION: change.version})
            self._is_behind = False
        except OSError:
            self._is_behind = True
            log.warning("a change of the index could not be applied to the saved questions", exc_info=True)
            with suppress(OSError):  # memory is emptied first
                self.clear()


def finished(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that waits for nothing: how synchronous calls run the asynchronous way."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    coroutine.close()
    raise RuntimeError("a synchronous retriever awaited something")


def name_of(embedder: object) -> str:
    """Identity of an embedding model, as far as its class and the name of its model tell."""
    named = {name: getattr(embedder, name, None) for name in _MODEL_SETTINGS}
    shown = ",".join(
        f"{name}={value}" for name, value in named.items() if isinstance(value, str | int | dict)
    )
    return f"{type(embedder).__module__}.{type(embedder).__qualname__}:{shown}"


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def _text_of(text: Callable[[Document], str]) -> Callable[[Any], str]:
    return lambda found: found.text if isinstance(found, Candidate) else text(found)
