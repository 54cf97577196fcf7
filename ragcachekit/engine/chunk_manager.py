"""Chunks that are given to an engine and taken from it: register, prefetch, encode, forget."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from threading import Lock
from typing import Protocol, TypeVar
from weakref import WeakSet

from tqdm.auto import tqdm

from ragcachekit.background import attempt
from ragcachekit.config import check_type
from ragcachekit.encode.background import BackgroundEncoder
from ragcachekit.engine.load_path import LoadPath
from ragcachekit.engine.prompt_planner import MODEL_CHANGED, PromptPlanner
from ragcachekit.errors import ModelChanged
from ragcachekit.plan.link_plan import Missing
from ragcachekit.plan.prefetch_keys import is_chunk_id
from ragcachekit.policies.base import SelectionPolicy
from ragcachekit.prefix_tree.knowledge_tree import KnowledgeTree
from ragcachekit.prompt.registry import forms
from ragcachekit.store.base import KVStore
from ragcachekit.store.forget_epochs import ForgetEpochs
from ragcachekit.store.null import NullStore
from ragcachekit.types import chunk_id

log = logging.getLogger(__name__)

_NOT_KEPT = (
    "could not be kept, as the store is too small, full or failing (failed_writes in stats() says where)"
)

_Item = TypeVar("_Item")


class QueryResults(Protocol):
    """Cached search results, such as :class:`ragcachekit.CachedRetrieval`."""

    def forget_texts(self, namespace: str, forgotten: Callable[[str], bool] | None = None) -> int:
        """Drop results that name a forgotten text; all of the namespace with None."""
        ...


class ChunkManager:
    """Registers, encodes and forgets chunks; the parameters are the components that this concerns.

    ``policy`` is the engine's own: it says what chunks are encoded behind.
    """

    def __init__(
        self,
        policy: SelectionPolicy,
        prompts: PromptPlanner,
        store: KVStore,
        tree: KnowledgeTree | None,
        loads: LoadPath,
        background_encoder: BackgroundEncoder,
        forgets: ForgetEpochs,
    ) -> None:
        self._policy, self._prompts, self._store, self._tree = policy, prompts, store, tree
        self._loads, self._warmer, self._forgets = loads, background_encoder, forgets
        self._query_caches: WeakSet[QueryResults] = WeakSet()
        self._registering = Lock()
        self._warned = False

    def add_query_cache(self, cache: QueryResults) -> None:
        """From now on what is forgotten here is forgotten there first."""
        self._query_caches.add(cache)

    # -- what is given ahead -----------------------------------------------------------------------

    def register(self, texts: Iterable[str], namespace: str) -> int:
        """Make texts known as chunks; how many of them prompts can be searched for."""
        since, texts = self._forgets.now(), strings(texts, "texts")
        self._unless_forgotten(self._prompts.neighbours.register, texts, namespace, since)
        result = self._unless_forgotten(self._prompts.register, texts, namespace, since)
        self._unless_forgotten(self._prompts.note_retrieved, texts, namespace, since)
        return result.added + result.known

    def prefetch(
        self, chunks: Iterable[str], namespace: str, policy: SelectionPolicy, system: str | None
    ) -> None:
        """Begin to load chunks (texts or ids) for a prompt that will come."""
        since, chunks = self._forgets.now(), strings(chunks, "chunks")
        texts = [chunk for chunk in chunks if not is_chunk_id(chunk)]
        self._unless_forgotten(self._prompts.note_retrieved, texts, namespace, since)
        if policy.reads_cache:
            self._loads.prefetch(lambda: self._prompts.prefetch_keys(chunks, namespace, policy, system))

    def encode(self, texts: Iterable[str], namespace: str, system: str | None, progress: bool) -> list[str]:
        """Register chunks and encode those that are not stored; ids of all of them, in order.

        Raises
        ------
        ValueError, ModelChanged
        """
        since = self._forgets.now()
        if not self._prompts.unchanged():
            raise ModelChanged(MODEL_CHANGED)
        texts = strings(texts, "texts")
        self._unless_forgotten(self._prompts.neighbours.register, texts, namespace, since)
        missing = self._prompts.missing(texts, namespace, self._policy, system, since)
        self._unless_forgotten(self._prompts.register, texts, namespace, since)
        todo = self._warmer.complete(item for item in missing if item.key not in self._store)
        if isinstance(self._store, NullStore):
            self._warn(
                "encode keeps nothing: the store has no tier; give StoreConfig host_bytes or a disk_path"
            )
        with tqdm(total=sum(len(i.token_ids) for i in todo), unit="tok", disable=not progress) as bar:
            self._warmer.now(todo, lambda tokens: self._encoded(tokens, bar.update))
        if lost := self._warmer.refused(item.key for item in todo):
            self._warn(f"encode: {lost} of {len(todo)} entries {_NOT_KEPT}")
        return [item.key.chunk_id for item in missing]

    def _encoded(self, tokens: int, update: Callable[[int], object]) -> None:
        update(tokens)
        if self._loads.cost.needed:  # no request waits here
            attempt(lambda _: self._loads.measure(), None)

    def not_kept(self, missing: Collection[Missing]) -> str | None:
        """A note for the report where entries are missing because the store could not keep them before."""
        lost = self._warmer.refused(item.key for item in missing)
        if not lost or isinstance(self._store, NullStore):
            return None
        return f"{lost} missing entr{'ies' if lost > 1 else 'y'} {_NOT_KEPT}"

    def _warn(self, message: str) -> None:
        if not self._warned:
            self._warned = True
            log.warning("%s", message)

    def _unless_forgotten(
        self, use: Callable[[str, list[str]], _Item], texts: Sequence[str], namespace: str, since: int
    ) -> _Item:
        """``use`` of those texts that were not forgotten since; no forget ends meanwhile."""
        with self._registering:
            return use(namespace, [t for t in texts if not self._forgets.forgot_text(namespace, t, since)])

    # -- what is forgotten -------------------------------------------------------------------------

    def forget(self, ids: Iterable[str] | None, texts: Iterable[str] | None, namespace: str) -> int:
        """Drop chunks, all of the namespace with neither ids nor texts; how many entries went."""
        if ids is None and texts is None:
            self._forget_results(namespace, None)
            return self._forget(namespace, None, ())
        ids, texts = strings(ids or (), "ids"), strings(texts or (), "texts")
        named, bare = frozenset(ids), frozenset(text.strip() for text in texts)

        def is_gone(text: str) -> bool:
            return text.strip() in bare or self._is_one_of(text, named, namespace)

        self._forget_results(namespace, is_gone)
        # As they are stored, and whole, as an older version kept those with blanks at their end.
        every = [form for text in texts for form in forms(text)]
        tokens = [self._prompts.chunk_ids(form) for form in every]
        tokens += [self._prompts.tokens.chunk(form) for form in every]
        return self._forget(namespace, frozenset([*ids, *(chunk_id(t, namespace) for t in tokens)]), texts)

    def _forget_results(self, namespace: str, is_gone: Callable[[str], bool] | None) -> None:
        # Before the registry: a retriever registers what it found only while nothing was forgotten since.
        for cache in list(self._query_caches):
            try:
                cache.forget_texts(namespace, is_gone)
            except Exception:  # the KV goes all the same
                log.exception("cached search results could not be forgotten; clear the retriever's cache")

    def _is_one_of(self, text: str, ids: frozenset[str], namespace: str) -> bool:
        chunk_ids = self._prompts.chunk_ids
        return bool(ids) and any(chunk_id(chunk_ids(form), namespace) in ids for form in forms(text))

    def _forget(self, namespace: str, gone: frozenset[str] | None, texts: Sequence[str]) -> int:
        """The entries, while nobody stores any; then what was begun before counts as out of date."""
        with self._warmer.forgetting(namespace, gone):
            try:
                return self._drop(namespace, gone)
            finally:  # also where a tier raised
                with self._registering:
                    self._forgets.add(namespace, gone, texts)
                    self._prompts.forget(namespace, gone, texts)

    def _drop(self, namespace: str, gone: frozenset[str] | None) -> int:
        """From every tier; where one raises, the others have dropped theirs."""
        from_tree = 0
        self._prompts.variants.forget(namespace, gone)
        try:
            from_store = self._store.forget(namespace, gone)
        finally:
            self._loads.forget(namespace, gone)  # after the store: what is opened in between goes too
            if self._tree is not None:
                from_tree = self._tree.forget(namespace, gone)
        return from_tree + from_store


def several(items: Iterable[_Item], what: str) -> list[_Item]:
    """A list of them, or a TypeError: one string would be taken for its letters."""
    if isinstance(items, str):
        raise TypeError(f"{what} must be a list of strings, not one string")
    check_type(what, items, Iterable, "a list")
    return list(items)


def strings(items: Iterable[str], what: str) -> list[str]:
    """As :func:`several`, and each of them a string; of a document it is said where its text is."""
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
