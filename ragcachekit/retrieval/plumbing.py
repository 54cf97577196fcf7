"""What the retrievers of both integrations share; they import nothing else that is not public.

:meth:`RetrieverCache.retrieve` is the path of a question, for synchronous and asynchronous calls alike: its
partition, its embedding, the lookup, or else the search, whose result is kept if the partition is still the
same; then the texts are registered with the engine.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import os
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Generic, Literal, NamedTuple, NoReturn, TypedDict, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ragcachekit.errors import RetrievalError
from ragcachekit.retrieval.cached_retrieval import CachedRetrieval, Lookup
from ragcachekit.retrieval.cached_retrieval import Retrieved as Retrieved
from ragcachekit.retrieval.distances import as_rows
from ragcachekit.retrieval.documents import DocumentIndex, Hit, Record
from ragcachekit.retrieval.index import distances
from ragcachekit.retrieval.near_misses import Guard
from ragcachekit.retrieval.partition import Identity, KeyReader, NotKeyable, Version, bypassed, lasting
from ragcachekit.retrieval.partition import KeyRules as KeyRules
from ragcachekit.retrieval.partition import Partition as Partition
from ragcachekit.retrieval.partition import name_of as name_of
from ragcachekit.retrieval.proximity import ProximityCache
from ragcachekit.retrieval.saved import Group, SavedQuestions
from ragcachekit.retrieval.stores import metric_of, state_of
from ragcachekit.types import positive

log = logging.getLogger(__name__)

Document = TypeVar("Document")
T = TypeVar("T")

Order = Literal["found", "cached"]

FACTOR = 4
"""Candidates per document that is asked for, in an index of one's own."""
STAGES = 8
"""Of a search in an index of one's own that is watched."""

_MAX_FOLLOWED = 4096  # chunks whose neighbours in the store are remembered

_ENGINE = ("register", "prefetch", "add_query_cache")


class RetrieverSettings(TypedDict, total=False):
    """Settings of a caching retriever.

    Attributes
    ----------
    rag : RagCache or None
        The engine to register chunks with.
    namespace : str or None
        Tenant and corpus; None for the engine's own, ``"default"`` without one.
    tolerance : float
        Maximum distance of a hit in the metric's unit; 0 (the default) is an equal vector, and an equal
        question where the search does not go by vector. Calibrate anything else.
    capacity, metric
        As for :class:`ragcachekit.ProximityCache`; 1,000 questions by default. ``metric`` is that of
        the index or store that is searched. Where that is not known, it is ``cosine``, and with a tolerance
        the log says so.
    ttl : float or None
        Seconds after its search at which a result expires, however often it is asked for.
    max_idle : float or None
        Seconds after its last hit at which a result expires. Popular results of before a change live on.
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
    order : {"found", "cached"}
        "cached" puts the documents that continue the longest beginning in the engine's knowledge tree first
        (:meth:`ragcachekit.RagCache.cached_first`), at every call. Their prompt reuses more exactly, and the
        answer may depend on the order.
    path : path or None
        A folder that keeps cached questions for the next process; over an index of its own, the folder of the
        index. They are used again while the stores have the same count or version; those of stores without
        need ``ttl`` or ``version``.
    """

    rag: Any
    namespace: str | None
    tolerance: float
    capacity: int
    metric: str | None
    ttl: float | None
    max_idle: float | None
    guard: bool | Guard
    version: Callable[[], object] | None
    partition: Callable[..., object] | None
    order: Order
    path: str | os.PathLike[str] | None


@dataclass(frozen=True)
class Framework(Generic[Document]):
    """What a framework's documents are like.

    ``source`` names what a document is a chunk of. ``document`` makes one of what an index of one's own
    holds, its distance from the question, and the metric. ``to_json`` and ``from_json`` save documents.
    """

    rules: KeyRules
    id: Callable[[Document], str | None]
    text: Callable[[Document], str]
    source: Callable[[Document], str | None]
    document: Callable[[Record, float, str], Document]
    to_json: Callable[[Document], object]
    from_json: Callable[[Any], Document]


class Candidate(NamedTuple):
    """A document as an index of one's own holds it (``id``, ``text``, ``metadata``), and its vector."""

    record: Record
    vector: NDArray[np.float32]


@dataclass(frozen=True)
class OwnSearch:
    """The search of one question for the ``k`` nearest documents that ``where`` accepts.

    A cached question's nearest documents are those of a near question in another order. So more candidates
    than asked for are cached with their vectors, and put in order for each question they serve.
    """

    index: DocumentIndex
    k: int
    where: Any

    def search(
        self, embedding: ArrayLike, on_stage: Callable[[list[Hit]], object] | None = None
    ) -> list[Candidate]:
        """The nearest candidates; fewer if there are no more. ``on_stage`` gets the hits of every stage."""
        count, hits = FACTOR * self.k, list[Hit]()
        while True:
            if on_stage is None:
                hits = self.index.search(embedding, count, self.where)
            else:
                for hits in self.index.search_stages(embedding, count, STAGES, self.where):
                    on_stage(hits)
            records = [hit.record for hit in hits]
            try:
                vectors = self.index.vectors([record.id for record in records])
            except RetrievalError:  # one of them was deleted meanwhile
                continue
            return [Candidate(*pair) for pair in zip(records, vectors, strict=True)]

    def nearest(self, candidates: Sequence[Candidate], embedding: ArrayLike) -> list[tuple[Record, float]]:
        """The ``k`` candidates nearest to a question, in order, and their distances."""
        if not candidates:
            return []
        vectors = np.stack([one.vector for one in candidates])
        (query,) = as_rows(np.asarray(embedding)[None], vectors.shape[1], self.index.metric)
        gaps = distances(query, vectors, self.index.metric)
        order = np.argsort(gaps, kind="stable")[: self.k].tolist()
        return [(candidates[at].record, float(gaps[at])) for at in order]


@dataclass(frozen=True)
class Call(Generic[Document]):
    """One question to a retriever.

    ``partition`` is called before and after the search. ``embed`` and ``search`` may return awaitables;
    ``search`` gets the embedding, or None where that cannot be used. ``own`` is the search in an index of
    one's own. ``in_thread`` awaits a function in another thread; None in synchronous calls.

    ``on_stage`` is called with the documents of each stage of the search in an index of one's own, or with
    None before a search without stages.
    """

    namespace: str
    question: str
    partition: Callable[[], Partition | None]
    embed: Callable[[], Any]
    search: Callable[[Any], Iterable[Document] | Awaitable[Iterable[Document]]]
    own: OwnSearch | None = None
    in_thread: Callable[..., Awaitable[Any]] | None = None
    on_stage: Callable[[tuple[Document, ...] | None], object] | None = None


class RetrieverCache(CachedRetrieval[Document]):
    """A :class:`CachedRetrieval` with the partitions of one retriever, registered with the engine.

    ``store`` is what ``retriever`` searches, ``index`` one's own below it. For the settings see
    :class:`RetrieverSettings`. ValueError or TypeError for bad ones.
    """

    def __init__(
        self,
        framework: Framework[Document],
        *,
        retriever: object = None,
        store: object = None,
        index: DocumentIndex | None = None,
        rag: Any = None,
        tolerance: float = 0.0,
        capacity: int = 1000,
        metric: str | None = None,
        ttl: float | None = None,
        max_idle: float | None = None,
        guard: bool | Guard = True,
        version: Callable[[], object] | None = None,
        partition: Callable[..., object] | None = None,
        order: Order = "found",
        path: str | os.PathLike[str] | None = None,
    ) -> None:
        if order not in ("found", "cached"):
            raise ValueError(f"order must be 'found' or 'cached', got {order!r}")
        if order == "cached" and not hasattr(rag, "cached_first"):
            raise ValueError("order='cached' needs rag=RagCache(...), whose tree tells the order")
        if partition is not None and not callable(partition):
            raise TypeError(f"partition= must be a function of the question, got {partition!r}")
        if rag is not None and not all(hasattr(rag, name) for name in _ENGINE):
            raise TypeError(f"RagCacheRetriever needs rag=RagCache(...) or None, got {rag!r}")

        def text_of(found: Any) -> str:
            return found.record.text if isinstance(found, Candidate) else framework.text(found)

        def shown(found: Any) -> Any:
            return framework.document(found.record, 0.0, "") if isinstance(found, Candidate) else found

        metric = metric or (metric_of(store) if index is None else index.metric)
        self.metric = metric or "cosine"
        keys = ProximityCache(capacity, tolerance, self.metric)
        if metric is None and tolerance and store is not None:
            log.warning(
                "the metric of the wrapped store is not known: questions are compared by cosine; pass metric="
            )
        saved = None
        if path is not None and index is not None and index.path is None:
            log.warning("path=: questions over an index in memory are not kept; give the index a path, too")
        elif path is not None:
            saved = SavedQuestions[Document](path, capacity, self._to_json, self._read)
        super().__init__(keys, text_of, guard=guard, ttl=ttl, max_idle=max_idle, saved=saved, shown=shown)
        self._reads_files = saved is not None or (index is not None and index.path is not None)
        self._follows: Callable[[str, str, int], Sequence[str]] | None = None
        self._index, self._is_fresh = index, ttl is not None or version is not None
        if saved is not None and index is None:  # a change of these indexes empties it from now on
            with suppress(Exception):  # of the user's code: then nothing is cached
                lasting(KeyReader(framework.rules).versions(retriever), state_of, saved, [])
        self._framework, self.rag, self.order = framework, rag, order
        self._custom, self._present_version = partition, version or (lambda: None)
        if rag is not None:
            rag.add_query_cache(self)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            "a caching retriever holds locks and callbacks, and cannot be pickled or copied deeply: wrap the "
            "retriever again in each process"
        )

    def namespace_of(self, namespace: str | None) -> str:
        """Tenant and corpus of the results: what is given, else the engine's, else ``"default"``."""
        return namespace or getattr(self.rag, "namespace", None) or "default"

    def partition(
        self,
        namespace: str,
        k: int,
        retriever: object,
        arguments: object,
        *,
        own: OwnSearch | None = None,
        configurable: object = None,
        question: tuple[object, ...] = (),
    ) -> Partition | None:
        """What a question may use of the cache; None, and one line in the log, if it must not be cached.

        It holds the retriever's fields with the versions of its indexes, the ``arguments`` of the search, and
        ``configurable``, the values of its run that the retriever may read. What the setting ``partition``
        returns for ``question`` stands in for the retriever and the run. ValueError or TypeError for a ``k``
        that is no positive integer.
        """
        positive("k", k)
        if bypassed.get():
            return None
        reader, counts = KeyReader(self._framework.rules), None
        try:
            if self._custom is not None and (counts := self._custom(*question)) is None:
                return None
            asked = reader.key((arguments, self._present_version()))
            if own is not None:
                version = Version(Identity(own.index), own.index.version)
                return Partition(namespace, k, asked, reader.key(counts), version)
            if self._custom is None:
                return Partition(namespace, k, asked, reader.key(retriever), reader.key(configurable))
            return Partition(namespace, k, asked, reader.key(counts), reader.versions(retriever))
        except Exception as error:  # of the user's code, too; and other threads may change what is read
            why = str(error) if isinstance(error, NotKeyable) else repr(error)
            self._warn(
                f"results of {type(retriever).__name__} are not cached, as what they depend on cannot be "
                f"read ({why}); pass partition= to name what counts"
            )
            return None

    def follow(
        self,
        retriever: object,
        namespace: Callable[[], str],
        nearest: Callable[[str, int], Iterable[Document]],
    ) -> None:
        """Find the neighbours of chunks by ``nearest``, anew after changes of the retriever or its indexes.

        It gets a text and a number, and finds only what whoever asks the retriever may read.
        """

        def found(text: str, most: int, _key: Hashable) -> tuple[str, ...]:
            texts = list(map(self._framework.text, nearest(text, most + 1)))
            others = [one for one in texts if one.strip() != text]
            return tuple(dict.fromkeys(others)) if len(others) < len(texts) else ()

        cached, rules = lru_cache(_MAX_FOLLOWED)(found), self._framework.rules
        self._follows = lambda text, asked, most: (
            cached(text.strip(), most, KeyReader(rules).key(retriever)) if asked == namespace() else ()
        )

    def unfollow(self) -> None:
        """Find no neighbours from now on, as calls name what they may find."""
        self._follows = None

    def neighbours_of(self, text: str, namespace: str, most: int) -> Sequence[str]:
        """Chunks nearest to one of the store that is searched, nearest first; none for a text it lacks."""
        try:
            return () if self._follows is None else self._follows(text, namespace, most)
        except Exception as error:
            self._warn(f"the store cannot be searched for the neighbours of chunks: {error!r}")
            return ()

    async def retrieve(self, call: Call[Document]) -> tuple[tuple[Document, ...], Retrieved[Document] | None]:
        """Answer a question from the cache or by its search, and register the texts with the engine.

        The documents are the cache's own (hand out copies); the result is None if nothing was looked up.
        """
        epoch = self.epoch
        partition = await self._aside(call, call.partition)
        embedding = await self._embedding(call)
        lookup, result = None, None
        if partition is not None and embedding is not None:
            lookup = await self._aside(call, self._ask, call, embedding, partition)
        if lookup is None:
            documents = tuple(await _searched(call, None))
        else:
            result = lookup.result
            if not result.hit and call.own is not None and not result.note:
                result = await _in_thread(call, self._search_own, call, lookup, epoch)
            elif not result.hit:
                found = tuple(await _searched(call, None if result.note else embedding))
                pairs = [(self._framework.id(one), one) for one in found]
                result = await self._aside(call, self._keep, call, lookup, pairs)
            documents = result.documents
        await self._aside(call, self._register, call.namespace, documents, epoch)
        if self.order == "cached":
            documents = await _in_thread(call, self._cached_first, call.namespace, documents)
        return documents, result

    async def _aside(self, call: Call[Document], work: Callable[..., T], *arguments: Any) -> T:
        """Call in a thread where a file may be read or written, else here."""
        return await _in_thread(call, work, *arguments) if self._reads_files else work(*arguments)

    async def _embedding(self, call: Call[Document]) -> Any:
        try:
            return await _awaited(call.embed())
        except Exception:
            self._not_embedded()
            return None

    def _ask(self, call: Call[Document], embedding: Any, partition: Partition) -> Lookup[Document] | None:
        with np.errstate(over="ignore"):  # too large for float32: infinite, which the lookup refuses
            try:
                row = np.asarray(embedding, np.float32)
            except (TypeError, ValueError):
                self._not_embedded()
                return None
        if partition not in self._cache and (group := self._group(partition)):
            self.restore(partition, group, row.size)
        lookup = self.lookup(row, partition, question=call.question)
        if not lookup.result.hit:
            lookup = lookup._replace(group=self._group(partition))
        if call.own is None or not lookup.result.hit:
            return lookup
        return lookup._replace(result=self._ordered(call.own, lookup.result, row))

    def _search_own(self, call: Call[Document], lookup: Lookup[Document], epoch: int) -> Retrieved[Document]:
        """Search an index of one's own, and keep the candidates."""
        own: Any = call.own

        def offer(hits: Sequence[Hit]) -> None:  # registered and in order as the last ones will be
            documents = tuple(self._framework.document(*hit, own.index.metric) for hit in hits[: own.k])
            self._register(call.namespace, documents, epoch)
            is_found, on_stage = self.order == "found", call.on_stage
            assert on_stage is not None
            on_stage(documents if is_found else self._cached_first(call.namespace, documents))

        candidates = own.search(lookup.embedding, call.on_stage and offer)
        kept = self._keep(call, lookup, [(one.record.id, one) for one in candidates])
        return self._ordered(own, kept, lookup.embedding)

    def _ordered(
        self, own: OwnSearch, result: Retrieved[Document], embedding: ArrayLike
    ) -> Retrieved[Document]:
        """A result of candidates, as the documents that the question gets."""
        candidates: Any = result.documents
        nearest, metric = own.nearest(candidates, embedding), own.index.metric
        return replace(result, documents=tuple([self._framework.document(*one, metric) for one in nearest]))

    def _keep(
        self, call: Call[Document], lookup: Lookup[Document], pairs: Sequence[tuple[Any, Any]]
    ) -> Retrieved[Document]:
        """Insert what a search found, if the partition is the same after it."""
        if call.partition() == lookup.partition:
            if lookup.group is not None and self._group(lookup.partition) != lookup.group:
                lookup = lookup._replace(group=None)
            return self.insert(lookup, pairs)
        return self.searched(lookup, [document for _, document in pairs])

    def _group(self, partition: Hashable) -> Group | None:
        """The name of a partition in the folder; None, and one line in the log, if it has none."""
        if self._saved is None:
            return None
        epoch, states = self._saved.epoch, list[object]()
        try:
            named = lasting(partition, state_of, self._saved, states)
            if not self._is_fresh and (None in states or not any(states)):
                raise NotKeyable("a store without a count or version; pass ttl= or version=")
        except Exception as error:
            self._warn(f"cached questions are not kept for the next process: {error}")
            return None
        return hashlib.sha256(repr(named).encode()).hexdigest()[:32], epoch

    def _to_json(self, found: Any) -> object:
        if isinstance(found, Candidate):
            return found.record.id
        value = json.loads(json.dumps(self._framework.to_json(found)))
        if self._framework.from_json(value) != found:
            raise ValueError("a document that is no JSON")
        return value

    def _read(self, value: Any) -> Any:
        if self._index is None or isinstance(value, dict):
            return self._framework.from_json(value)
        (record,), (vector,) = self._index.get([value]), self._index.vectors([value])
        return Candidate(record, vector)

    def _register(self, namespace: str, documents: Sequence[Document], epoch: int) -> None:
        """Register and prefetch texts, unless something was forgotten since ``epoch``.

        A failing engine costs their reuse, not the answer.
        """
        text_of, source_of = self._framework.text, self._framework.source
        pairs = [(text, source_of(one)) for one in documents if (text := text_of(one)).strip()]
        if self.rag is None or not pairs:
            return
        texts, sources = map(list, zip(*pairs, strict=True))

        def register() -> None:
            known = {"sources": sources} if any(sources) else {}
            self.rag.register(texts, namespace=namespace, **known)
            self.rag.prefetch(texts, namespace=namespace)  # loads while the prompt is made

        try:
            self.while_current(epoch, register)
        except Exception:
            log.warning("could not register the retrieved chunks with the engine", exc_info=True)

    def _cached_first(self, namespace: str, documents: tuple[Document, ...]) -> tuple[Document, ...]:
        """The documents in the engine's order; as found if that fails."""
        texts = list(map(self._framework.text, documents))
        try:
            order = self.rag.cached_first(texts, namespace=namespace)
        except Exception:
            log.warning("the retrieved chunks are in the order found", exc_info=True)
            return documents
        return tuple(documents[number] for number in order)

    def _not_embedded(self) -> None:
        log.warning("embedding the question failed, searching without the query cache", exc_info=True)


def finished(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that waits for nothing: how synchronous calls run the asynchronous way."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    coroutine.close()
    raise RuntimeError("a synchronous retriever awaited something")


async def _in_thread(call: Call[Any], work: Callable[..., T], *arguments: Any) -> T:
    """Call in a thread where the call is asynchronous."""
    if call.in_thread is None:
        return work(*arguments)
    result: T = await call.in_thread(work, *arguments)
    return result


async def _searched(call: Call[Document], embedding: Any) -> Iterable[Document]:
    """What a search without stages finds."""
    if call.on_stage is not None:
        call.on_stage(None)
    found: Iterable[Document] = await _awaited(call.search(embedding))
    return found


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value
