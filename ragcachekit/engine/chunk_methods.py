"""The methods of RagCache that give it chunks and take them away."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from threading import Lock
from typing import Any, TypeVar
from weakref import WeakSet

from tqdm.auto import tqdm

from ragcachekit.background import attempt
from ragcachekit.config import check_type
from ragcachekit.engine.components import EngineComponents
from ragcachekit.engine.options import checked_namespace
from ragcachekit.engine.request_path import NOT_KEPT
from ragcachekit.errors import Closed, ModelChanged, StoreError
from ragcachekit.model.kv import token_ids_of
from ragcachekit.observers import Observers
from ragcachekit.plan.planner import MODEL_CHANGED
from ragcachekit.plan.prefetch_keys import is_chunk_id
from ragcachekit.prompt.parser import PromptLike
from ragcachekit.prompt.registry import forms
from ragcachekit.query.retrieval import CachedRetrieval
from ragcachekit.store.base import KVStore, NullStore, concerns
from ragcachekit.store.forgets import ForgottenTexts
from ragcachekit.types import KVKey, chunk_id, whole_id

log = logging.getLogger(__name__)

_Item = TypeVar("_Item")


class ChunkMethods:
    """Register, prefetch, encode and forget chunks; the base of :class:`ragcachekit.RagCache`."""

    def __init__(self, components: EngineComponents, namespace: str) -> None:
        self._components, self.namespace = components, namespace
        self._parser, self._planner = components.parser, components.planner
        self._policy = components.policy
        self._query_caches: WeakSet[CachedRetrieval[Any]] = WeakSet()
        self._registering, self._observers = Lock(), Observers()
        self._warned = self._closed = False

    def add_query_cache(self, cache: CachedRetrieval[Any]) -> None:
        """Let :meth:`forget` drop results of this query cache too; called by retrievers of this engine.

        The cache is referenced weakly. The engine's observers are called at its lookups.
        """
        self._query_caches.add(cache)
        cache.observers = self._observers

    def register(
        self,
        texts: Iterable[str],
        *,
        namespace: str | None = None,
        sources: Sequence[str | None] | None = None,
    ) -> int:
        """Search prompts for these texts as chunks; costs no model work.

        ``sources`` names the document of each text, for ``companions="same-source"``; None where it is not
        known. Returns how many can be found (texts too short to be told apart are left out).
        """
        namespace, since = self._checked(namespace), self._components.forgets.now()
        texts = strings(texts, "texts")
        self._note_sources(texts, sources, namespace, since)
        self._unless_forgotten(self._planner.neighbours.register, texts, namespace, since)
        return self._unless_forgotten(self._parser.register, texts, namespace, since)

    def order(
        self,
        document: str,
        texts: Sequence[str],
        *,
        starts: Sequence[int] | None = None,
        namespace: str | None = None,
    ) -> None:
        """Note which chunks of a document follow each other, for encoders with neighbours.

        Costs no model work and registers nothing. Called by retrievers that have an index of their own.
        ``similar:n`` encodes a chunk behind those before it. ``average:n`` uses the chunks around it where
        none was registered together with it.

        Parameters
        ----------
        document : str
            Any name; equal names are one document.
        starts : sequence of int, optional
            Place of each chunk, such as its first character; else they follow what is known already.
        """
        where, since = self._checked(namespace), self._components.forgets.now()
        texts = strings(texts, "texts")
        if starts is not None and len(starts) != len(texts):
            raise ValueError(f"{len(starts)} starts for {len(texts)} texts")

        places = dict(zip(reversed(texts), reversed(starts), strict=True)) if starts is not None else None

        def note(namespace: str, texts: Sequence[str]) -> None:
            known = None if places is None else [places[text] for text in texts]
            self._planner.neighbours.order(namespace, document, texts, known)

        self._unless_forgotten(note, texts, where, since)

    def drop_order(self, texts: Iterable[str], *, namespace: str | None = None) -> None:
        """Take chunks out of the order of their documents: no chunk is encoded behind them any more.

        Their KV, and KV that was encoded behind them, stays until :meth:`forget`.
        """
        self._planner.neighbours.drop_order(self._checked(namespace), strings(texts, "texts"))

    def prefetch(
        self, chunks: Iterable[str], *, namespace: str | None = None, system: str | None = None
    ) -> None:
        """Begin to load chunks from slow tiers for a later prompt; returns at once.

        Called by retrievers.

        Parameters
        ----------
        chunks : iterable of str
            Chunk texts, or ids as :meth:`encode` returned them.
        system : str, optional
            Text before the prompt's first chunk, for encoders that need it; default is the last one used in
            the namespace.
        """
        where, since = self._checked(namespace), self._components.forgets.now()
        policy, chunks = self._components.choose_policy(None, where).policy, strings(chunks, "chunks")
        texts = [chunk for chunk in chunks if not is_chunk_id(chunk)]
        self._unless_forgotten(self._parser.special_tokens.add, texts, where, since)
        if policy.reads_cache:
            find = self._planner.prefetch_keys
            self._components.loads.prefetch(lambda: find(chunks, where, policy, system))

    def encode(
        self,
        texts: Iterable[str],
        *,
        namespace: str | None = None,
        system: str | None = None,
        prompt: PromptLike | None = None,
        sources: Sequence[str | None] | None = None,
        progress: bool = False,
    ) -> list[str]:
        """Register chunks and compute their KV now, except what is stored already.

        What :meth:`forget` drops meanwhile is neither stored nor registered, nor is what depends on it.

        Parameters
        ----------
        system : str, optional
            Text before a prompt's first chunk, as the model sees it, for encoders that need it; default is
            the last one used in the namespace. Before any, ``policy="auto"`` encodes chunks alone
            (``standalone``), and uses them so until its check.
        prompt : str, messages or Prompt, optional
            A prompt like those to come, with at least one of the texts: instead of ``system``, what stands
            before its first chunk. Nothing is generated.
        sources : sequence of str, optional
            As for :meth:`register`.
        progress : bool
            Show a progress bar over tokens.

        Returns
        -------
        list of str
            Chunk ids of all texts, in order.

        Raises
        ------
        Cancelled
            In a cancelled :class:`ragcachekit.CancelScope`; what was encoded before is kept.
        ValueError
            For an empty chunk, one longer than the model's context, a missing ``system``, or a ``prompt``
            without chunks or beside a ``system``.
        ModelChanged
            If the model changed since this object was made.
        """
        namespace, parts, since = self._checked(namespace), self._components, self._components.forgets.now()
        if not self._planner.unchanged():
            raise ModelChanged(MODEL_CHANGED)
        texts = strings(texts, "texts")
        self._note_sources(texts, sources, namespace, since)
        self._unless_forgotten(self._planner.neighbours.register, texts, namespace, since)
        if prompt is not None:
            if system is not None:
                raise ValueError("give encode system= or prompt=, not both: the prompt has the system text")
            self._unless_forgotten(self._parser.register, texts, namespace, since)
            self._planner.observe(self._parser.parse(prompt, namespace))
        policy = parts.policy_to_encode(namespace, known=(system, prompt) != (None, None))
        missing = self._planner.missing(texts, namespace, policy, system, since)
        self._unless_forgotten(self._parser.register, texts, namespace, since)
        todo = parts.background_encoder.complete(item for item in missing if item.key not in parts.store)
        if isinstance(parts.store, NullStore):
            self._warn(
                "encode keeps nothing: the store has no tier; give StoreConfig host_bytes or a disk_path"
            )
        with tqdm(total=sum(len(i.token_ids) for i in todo), unit="tok", disable=not progress) as bar:
            parts.background_encoder.now(todo, lambda tokens: self._encoded(tokens, bar.update))
        if lost := parts.background_encoder.refused(item.key for item in todo):
            self._warn(f"encode: {lost} of {len(todo)} entries {NOT_KEPT}")
        return [item.key.chunk_id for item in missing]

    def forget(
        self,
        ids: Iterable[str] | None = None,
        *,
        texts: Iterable[str] | None = None,
        namespace: str | None = None,
    ) -> int:
        """Drop the KV of chunks and texts, and KV that was computed behind them, from all tiers.

        A text is forgotten wherever it stood: as a chunk, as a part of one, in a question, in the text before
        the first chunk, in an earlier turn. Whitespace in and around it does not count. Chunks that merely
        hold it stay registered. KV of which nobody can tell whether it holds the text is dropped, too.

        Cached search results that contain such a chunk are dropped too, in every retriever of this engine.
        Delete the document from its index first: what a search finds is registered again. Work that began
        before this returns stores no forgotten chunk. Another process on the same disk folder keeps its own
        host memory; its knowledge tree follows at its next request in the namespace.

        Parameters
        ----------
        ids : iterable of str, optional
            Chunk ids, as :meth:`encode` returned them. Their texts stay registered: a later prompt with one
            encodes it again.
        texts : iterable of str, optional
            Texts, long or short. Chunks among them are unregistered as well, in every form a chain may give
            them. A blank text is ignored.
        namespace : str, optional
            With neither ids nor texts, all of it is dropped.

        Returns
        -------
        int
            Entries dropped.

        Raises
        ------
        StoreError
            If a tier cannot confirm the deletion; all others have forgotten. Forget again.
        """
        where = self._checked(namespace)
        if ids is None and texts is None:
            self._forget_results(where, None)
            return self._forget(where, None, ())
        ids, texts = strings(ids or (), "ids"), strings(texts or (), "texts")
        named, bare = frozenset(ids), frozenset(text.strip() for text in texts)
        chunk_ids = self._parser.chunk_ids

        def is_forgotten(text: str) -> bool:
            if text.strip() in bare:
                return True
            return bool(named) and any(chunk_id(chunk_ids(form), where) in named for form in forms(text))

        self._forget_results(where, is_forgotten)
        every = [form for text in texts for form in forms(text)]
        named |= {chunk_id(chunk_ids(form), where) for form in every}
        if not every:
            return self._forget(where, named, ())
        decode = partial(self._parser.tokens.decode, special=True)
        decoded = [decode(self._parser.tokens.plain(form)) for form in every]
        return self._forget(where, named, texts, ForgottenTexts([*every, *decoded], decode))

    # -- steps -------------------------------------------------------------------------------------

    def _checked(self, namespace: str | None) -> str:
        """The namespace of a call; every public method checks it first."""
        if self._closed:
            raise Closed("this RagCache is closed; make a new one, or close it after its last use")
        return self.namespace if namespace is None else checked_namespace(namespace)

    def _encoded(self, tokens: int, update: Callable[[int], object]) -> None:
        update(tokens)
        if self._components.loads.cost.needed:  # no request waits here
            attempt(lambda _: self._components.loads.measure(), None)

    def _warn(self, message: str) -> None:
        if not self._warned:
            self._warned = True
            log.warning("%s", message)

    def _unless_forgotten(
        self, use: Callable[[str, list[str]], _Item], texts: Sequence[str], namespace: str, since: int
    ) -> _Item:
        """Apply ``use`` to the texts that were not forgotten since; no forget ends meanwhile."""
        forgot = self._components.forgets.forgot_text
        with self._registering:
            return use(namespace, [text for text in texts if not forgot(namespace, text, since)])

    def _note_sources(
        self, texts: Sequence[str], sources: Sequence[str | None] | None, namespace: str, since: int
    ) -> None:
        if sources is None:
            return
        if isinstance(sources, str) or len(sources) != len(texts):
            raise ValueError(
                "sources must be a list with the source of each text, None where it is not known"
            )
        note = self._planner.neighbours.note_source
        for source in dict.fromkeys(sources):
            if source is not None:
                of_it = [text for text, own in zip(texts, sources, strict=True) if own == source]
                self._unless_forgotten(partial(note, source), of_it, namespace, since)

    def _forget_results(self, namespace: str, is_forgotten: Callable[[str], bool] | None) -> None:
        # Before the registry: a retriever registers what it found only while nothing was forgotten since.
        for cache in list(self._query_caches):
            try:
                cache.forget_texts(namespace, is_forgotten)
            except Exception:  # the KV is dropped all the same
                log.exception("cached search results could not be forgotten; clear the retriever's cache")

    def _forget(
        self,
        namespace: str,
        ids: frozenset[str] | None,
        texts: Sequence[str],
        within: ForgottenTexts | None = None,
    ) -> int:
        """Drop entries while none is stored; work begun before this counts as out of date afterwards."""
        forgets = self._components.forgets
        with forgets.storing, forgets.storing_in_tree:
            try:
                return self._drop(namespace, ids, within)
            finally:  # also where a tier raised
                with self._registering:
                    try:  # before the epoch: work that begins with the next one has no such neighbour
                        self._planner.forget(namespace, ids, texts, within)
                        self._parser.forget(namespace, None if ids is None else texts)
                    finally:
                        forgets.add(namespace, ids, texts, within)
                        self._components.auto.forget(namespace, ids is None, within)

    def _drop(self, namespace: str, ids: frozenset[str] | None, within: ForgottenTexts | None) -> int:
        """Drop entries from every tier; where one raises, the others have dropped theirs."""
        if ids is None or within is None:
            return self._drop_ids(namespace, ids)
        unread: Exception | None = None
        try:
            ids |= self._holding(namespace, ids, within)
        except Exception as error:
            unread = error
        dropped = self._drop_ids(namespace, ids, within)
        if unread is not None:
            raise StoreError(
                f"the store could not be searched for the texts, and may hold them; forget again: {unread}"
            ) from unread
        return dropped

    def _drop_ids(
        self, namespace: str, ids: frozenset[str] | None, within: ForgottenTexts | None = None
    ) -> int:
        from_tree, parts = 0, self._components
        self._planner.variants.forget(namespace, ids)
        parts.background_encoder.misses.forget(namespace, ids)
        try:
            from_store = parts.store.forget(namespace, ids)
        finally:
            parts.loads.forget(namespace, ids)  # after the store: what is opened in between goes too
            if parts.tree is not None:
                texts = () if within is None else (within,)
                from_tree = parts.tree.forget(namespace, ids, *texts)
        return from_tree + from_store

    def _holding(self, namespace: str, gone: frozenset[str], within: ForgottenTexts) -> frozenset[str]:
        """Ids of chunks and texts that hold a forgotten text, alone or with what they were encoded behind."""
        parser, store = self._parser, self._components.store
        found = {
            chunk_id(parser.chunk_ids(text), namespace)
            for text in parser.registry.texts(namespace)
            if within.in_text(text)
        }
        system = self._planner.last_prompts.last(namespace)
        if system is not None and within.within(system):
            found.add(chunk_id(system, namespace))
        keys, unlisted = list(store.keys()), max((record.entries for record in store.stats()), default=0)
        # Those with the shortest context first: their ids account for what stands behind them.
        for key in sorted((key for key in keys if key.namespace == namespace), key=lambda k: len(k.context)):
            if not concerns(key, namespace, gone | found) and _may_hold(store, key, within):
                found.add(whole_id(key.chunk_id))
        if unlisted > len(keys):
            log.warning(
                "a tier does not list its entries: of %d, those that hold a forgotten text are known where "
                "they are registered or in other tiers; forget the namespace to be sure",
                unlisted,
            )
        return frozenset(found)


def _may_hold(store: KVStore, key: KVKey, within: ForgottenTexts) -> bool:
    """Whether an entry holds a forgotten text, or nobody can tell."""
    token_ids = token_ids_of(store.sums(key) or {})
    return token_ids is None or within.within(token_ids)


def several(items: Iterable[_Item], what: str) -> list[_Item]:
    """The items as a list; TypeError for one string, which would be taken for its letters."""
    if isinstance(items, str):
        raise TypeError(f"{what} must be a list of strings, not one string")
    check_type(what, items, Iterable, "a list")
    return list(items)


def strings(items: Iterable[str], what: str) -> list[str]:
    """As :func:`several`, but TypeError unless each is a string; of a document it names the text's field."""
    listed: list[str] = [items] if _own_text(items) else several(items, what)  # type: ignore[list-item]
    for number, item in enumerate(listed):
        own = _own_text(item)
        give = f"a string; give the {type(item).__name__}'s {own}" if own else "a string"
        check_type(f"{what}[{number}]", item, str, give)
    return listed


def _own_text(item: object) -> str | None:
    """Where a LangChain document, or a LlamaIndex node, has its text."""
    named = {"page_content": "page_content", "get_content": "get_content()"}
    return next((name for attribute, name in named.items() if hasattr(item, attribute)), None)
