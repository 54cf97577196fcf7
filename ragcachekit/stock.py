"""What one engine has in stock, and how it comes there: store, tree, load path, background encoding."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from threading import Lock
from typing import Any, Literal, Protocol, TypeVar
from weakref import WeakSet

from tqdm.auto import tqdm

from ragcachekit.config import LoadConfig, StoreConfig, TreeConfig, check_type
from ragcachekit.errors import ModelChanged
from ragcachekit.generate.background import attempt, flush_all
from ragcachekit.generate.keep import TreeKeeper
from ragcachekit.generate.loads import LoadPath, load_config
from ragcachekit.generate.run import Generated
from ragcachekit.link.base import SelectionPolicy
from ragcachekit.link.beginning import BeginningReader
from ragcachekit.link.contextual import NeighbourEncoder
from ragcachekit.link.in_prompt import InPromptEncoder
from ragcachekit.link.neighbours import Neighbours
from ragcachekit.link.observed import ObservedCache
from ragcachekit.link.planned import LinkPlan, Missing
from ragcachekit.link.upcoming import is_chunk_id
from ragcachekit.link.warm import Warmer
from ragcachekit.model.encoder import ChunkEncoder
from ragcachekit.model.layout import KVLayout
from ragcachekit.model.profiling import stored_profile
from ragcachekit.model.rope import Rope
from ragcachekit.prepare import MODEL_CHANGED, Preparer
from ragcachekit.prompt.registry import forms
from ragcachekit.store.base import KVStore, StoreStats
from ragcachekit.store.factory import open_store
from ragcachekit.store.forget_epochs import ForgetEpochs
from ragcachekit.store.null import NullStore
from ragcachekit.store.process import PerProcess
from ragcachekit.tree.factory import open_tree
from ragcachekit.tree.knowledge import KnowledgeTree
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


class Stock:
    """Keeps KV for one model: what was given ahead, what prompts missed, what answers left behind.

    Parameters
    ----------
    model, tokenizer, policy, encoder, store, cold, load, tree
        As :class:`ragcachekit.RagCache` takes them; ``policy`` opened.
    rope : Rope
    fingerprint : str
    folder : Path
        Where timings are kept, and with them what the tree's nodes cost.
    neighbours : mapping of str to Neighbours
        By namespace.

    Attributes
    ----------
    cold : {"background", "now", "never"}
    store : KVStore
    tree : KnowledgeTree or None
    forgets : ForgetEpochs
        Says whether a chunk, or its text, was forgotten since a moment.
    loads : LoadPath
        Brings entries from slow tiers.
    prompts : Preparer
        Looks prompts up here.
    warmer : Warmer
        Encodes what is missing.
    keeper : TreeKeeper or None
        Copies what was computed exactly into the tree.

    Raises
    ------
    ValueError
        If the encoder ``similar:n`` has no neighbours, or another one has them.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        policy: SelectionPolicy,
        *,
        rope: Rope,
        fingerprint: str,
        folder: Path,
        encoder: str | None,
        neighbours: Mapping[str, Neighbours],
        store: StoreConfig | KVStore | None,
        cold: Literal["background", "now", "never"],
        load: Literal["auto", "always"] | LoadConfig,
        tree: TreeConfig | KnowledgeTree | None,
    ) -> None:
        self._policy = policy
        self._warned = False
        self._query_caches: WeakSet[QueryResults] = WeakSet()
        self.forgets = ForgetEpochs()
        self._registering = PerProcess(Lock)
        self.cold = cold
        with ExitStack() as opened:  # closed again if a later step raises
            self.store: KVStore
            if store is None or isinstance(store, StoreConfig):
                self.store = open_store(store or StoreConfig())
                opened.callback(self.store.close)
            else:
                self.store = store
            config, layout = load_config(load), KVLayout.of(model)
            self.loads = LoadPath(
                model,
                self.store,
                config,
                fingerprint=fingerprint,
                folder=folder,
                context=rope.context,
                layout=layout,
            )
            opened.callback(self.loads.close)
            if isinstance(tree, TreeConfig):
                disk = store.disk_path if isinstance(store, StoreConfig) else None
                tree = _new_tree(tree, model, fingerprint, folder, disk)
                opened.callback(tree.close)
            self.tree = tree
            self.prompts = Preparer(
                model,
                tokenizer,
                rope=rope,
                store=self.store,
                fingerprint=fingerprint,
                encoder=encoder,
                neighbours=neighbours,
                fetch=self.loads.fetch,
                tree=BeginningReader(tree, rope, layout) if tree is not None else None,
            )
            self.keeper: TreeKeeper | None = None
            if tree is not None:
                when: Literal["now", "background"] = "now" if cold == "now" else "background"
                self.keeper = TreeKeeper(tree, rope, self.prompts.unchanged, self.forgets, when)
                opened.callback(self.keeper.close)
            if not self.prompts.encodings(policy).similar and self.prompts.neighbours:
                raise ValueError("neighbours= are for the encoder 'similar:n'; give encoder='similar:10'")
            self.warmer = _new_warmer(model, rope, self.store, self.prompts, layout, self.forgets)
            opened.callback(self.warmer.close)
            self._opened = opened.pop_all()

    def add_query_cache(self, cache: QueryResults) -> None:
        """From now on what is forgotten here is forgotten there first."""
        self._query_caches.add(cache)

    # -- what is given ahead -----------------------------------------------------------------------

    def register(self, texts: Iterable[str], space: str) -> int:
        """Make texts known as chunks; how many of them prompts can be searched for."""
        since, texts = self.forgets.now(), strings(texts, "texts")
        self._unless_forgotten(self.prompts.neighbours.welcome, texts, space, since)
        result = self._unless_forgotten(self.prompts.register, texts, space, since)
        self._unless_forgotten(self.prompts.note_retrieved, texts, space, since)
        return result.added + result.known

    def prefetch(
        self, chunks: Iterable[str], space: str, policy: SelectionPolicy, system: str | None
    ) -> None:
        """Begin to load chunks (texts or ids) for a prompt that will come."""
        since, chunks = self.forgets.now(), strings(chunks, "chunks")
        texts = [chunk for chunk in chunks if not is_chunk_id(chunk)]
        self._unless_forgotten(self.prompts.note_retrieved, texts, space, since)
        if policy.reads_cache:
            self.loads.prefetch(lambda: self.prompts.upcoming(chunks, space, policy, system))

    def encode(self, texts: Iterable[str], space: str, system: str | None, progress: bool) -> list[str]:
        """Register chunks and encode those that are not stored; ids of all of them, in order.

        Raises
        ------
        ValueError, ModelChanged
        """
        since = self.forgets.now()
        if not self.prompts.unchanged():
            raise ModelChanged(MODEL_CHANGED)
        texts = strings(texts, "texts")
        self._unless_forgotten(self.prompts.neighbours.welcome, texts, space, since)
        missing = self.prompts.missing(texts, space, self._policy, system, since)
        self._unless_forgotten(self.prompts.register, texts, space, since)
        todo = self.warmer.complete(item for item in missing if item.key not in self.store)
        if isinstance(self.store, NullStore):
            self._warn(
                "encode keeps nothing: the store has no tier; give StoreConfig host_bytes or a disk_path"
            )
        with tqdm(total=sum(len(i.token_ids) for i in todo), unit="tok", disable=not progress) as bar:
            self.warmer.now(todo, bar.update)
        if lost := self.warmer.refused(item.key for item in todo):
            self._warn(f"encode: {lost} of {len(todo)} entries {_NOT_KEPT}")
        return [item.key.chunk_id for item in missing]

    def _warn(self, message: str) -> None:
        if not self._warned:
            self._warned = True
            log.warning("%s", message)

    def _unless_forgotten(
        self, use: Callable[[str, list[str]], _Item], texts: Sequence[str], space: str, since: int
    ) -> _Item:
        """``use`` of those texts that were not forgotten since; no forget ends meanwhile."""
        with self._registering.get():
            return use(space, [t for t in texts if not self.forgets.forgot_text(space, t, since)])

    def forget(self, ids: Iterable[str] | None, texts: Iterable[str] | None, space: str) -> int:
        """Drop chunks, all of the namespace with neither ids nor texts; how many entries went."""
        if ids is None and texts is None:
            self._forget_results(space, None)
            return self._forget(space, None, ())
        ids, texts = strings(ids or (), "ids"), strings(texts or (), "texts")
        named, bare = frozenset(ids), frozenset(text.strip() for text in texts)
        self._forget_results(space, lambda text: text.strip() in bare or self._is_one_of(text, named, space))
        # As they are stored, and whole, as an older version kept those with blanks at their end.
        every = [form for text in texts for form in forms(text)]
        tokens = [self.prompts.chunk_ids(form) for form in every]
        tokens += [self.prompts.tokens.chunk(form) for form in every]
        return self._forget(space, frozenset([*ids, *(chunk_id(t, space) for t in tokens)]), texts)

    def _forget_results(self, space: str, forgotten: Callable[[str], bool] | None) -> None:
        # Before the registry: a retriever registers what it found only while nothing was forgotten since.
        for cache in list(self._query_caches):
            try:
                cache.forget_texts(space, forgotten)
            except Exception:  # the KV goes all the same
                log.exception("cached search results could not be forgotten; clear the retriever's cache")

    def _is_one_of(self, text: str, ids: frozenset[str], space: str) -> bool:
        return bool(ids) and any(chunk_id(self.prompts.chunk_ids(f), space) in ids for f in forms(text))

    def _forget(self, space: str, gone: frozenset[str] | None, texts: Sequence[str]) -> int:
        """The entries, while nobody stores any; then what was begun before counts as out of date."""
        with self.warmer.forgetting(space, gone):
            try:
                return self._drop(space, gone)
            finally:  # also where a tier raised
                with self._registering.get():
                    self.forgets.add(space, gone, texts)
                    self._unregister(space, gone, texts)

    def _drop(self, space: str, gone: frozenset[str] | None) -> int:
        """From every tier; where one raises, the others have dropped theirs."""
        from_tree = 0
        self.prompts.variants.forget(space, gone)
        try:
            from_store = self.store.forget(space, gone)
        finally:
            self.loads.forget(space, gone)  # after the store: what is opened in between goes too
            if self.tree is not None:
                from_tree = self.tree.forget(space, gone)
        return from_tree + from_store

    def _unregister(self, space: str, gone: frozenset[str] | None, texts: Sequence[str]) -> None:
        self.prompts.neighbours.forget(space, gone)
        self.prompts.retrieved.forget(space)
        self.prompts.forget(space, None if gone is None else texts)

    def noted(self, plan: LinkPlan) -> LinkPlan:
        """The plan; its report names what is missing because the store could not keep it before."""
        lost = self.warmer.refused(item.key for item in plan.missing)
        if not lost or isinstance(self.store, NullStore):
            return plan
        note = f"{lost} missing entr{'ies' if lost > 1 else 'y'} {_NOT_KEPT}"
        return plan.with_note(note)

    # -- what requests leave behind ----------------------------------------------------------------

    def after(self, generated: Generated) -> None:
        """A batch of requests was answered."""
        self.loads.learn(generated)
        if self.keeper is not None:
            self.keeper.after(generated)
        self._warm([item for plan in generated.plans for item in plan.missing])

    def after_link(self, plan: LinkPlan) -> None:
        """A prompt was linked for somebody else's generate call."""
        self.loads.follow([plan])
        self._warm(plan.missing)

    def _warm(self, missing: Iterable[Missing]) -> None:
        if self.cold == "background":
            self.warmer.later(missing)
        elif self.cold == "now":
            attempt(self.warmer.now, missing)

    # -- upkeep ------------------------------------------------------------------------------------

    def stats(self) -> tuple[StoreStats, ...]:
        """One record per tier of the store, then of the tree."""
        return (*self.store.stats(), *(self.tree.stats() if self.tree is not None else ()))

    def flush(self, timeout: float | None = None) -> bool:
        """Wait for everything in the background; False if ``timeout`` seconds did not suffice."""
        keeper = [self.keeper.flush] if self.keeper is not None else []
        return flush_all([self.warmer.flush, self.loads.flush, *keeper], timeout)

    def close(self) -> None:
        """End the threads, and close the store and the tree that were opened here."""
        self._opened.close()


def _new_tree(
    config: TreeConfig, model: Any, fingerprint: str, folder: Path, disk: str | os.PathLike[str] | None
) -> KnowledgeTree:
    profile = stored_profile(folder, fingerprint, model)
    return open_tree(
        config,
        model.device,
        folder=None if disk is None else Path(disk),
        cost=None if profile is None else profile.seconds,
    )


def _new_warmer(
    model: Any, rope: Rope, store: KVStore, prompts: Preparer, layout: KVLayout, forgets: ForgetEpochs
) -> Warmer:
    chunks = ChunkEncoder(model, rope, ObservedCache)
    behind = NeighbourEncoder(model, rope, chunks, store, layout)
    in_prompts = InPromptEncoder(model, rope)
    return Warmer(chunks, store, prompts.unchanged, behind, in_prompts, prompts.note_stored, forgets)


def checked_namespace(namespace: str) -> str:
    """It, or a ValueError: an empty name would be everybody's, and one that is no text has no digest."""
    if not isinstance(namespace, str) or not namespace:
        raise ValueError(f"namespace must be a non-empty string, got {namespace!r}")
    try:
        namespace.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"namespace must be text, got {namespace!r}: the lone surrogate at {error.start} is no character"
        ) from error
    return namespace


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
