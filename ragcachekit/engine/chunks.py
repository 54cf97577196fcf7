"""The chunks of an engine: registered, prefetched, encoded and forgotten."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from threading import Lock
from typing import Any, TypeVar
from weakref import WeakSet

from tqdm.auto import tqdm

from ragcachekit.engine.components import EngineComponents
from ragcachekit.errors import ModelChanged, StoreError
from ragcachekit.model.encoding import AverageEncoding
from ragcachekit.model.kv import SENSITIVITY, token_ids_of
from ragcachekit.plan.link_plan import Missing
from ragcachekit.plan.planner import MODEL_CHANGED
from ragcachekit.plan.variants import VariantPool, is_average
from ragcachekit.policies.base import SelectionPolicy
from ragcachekit.policies.registry import open_policy
from ragcachekit.prompt.parser import PromptLike
from ragcachekit.prompt.segments import forms
from ragcachekit.quality.check import CheckPrompt
from ragcachekit.quality.records import TuneReport
from ragcachekit.retrieval.cached_retrieval import CachedRetrieval
from ragcachekit.store.base import KVStore, NullStore, concerns
from ragcachekit.store.forgets import ForgottenTexts
from ragcachekit.threads import attempt
from ragcachekit.types import chunk_id, strings, whole_id

log = logging.getLogger(__name__)

NOT_KEPT = "could not be kept, as the store is too small, full or failing (see failed_writes in stats())"

_Item = TypeVar("_Item")


class EncodedIds(list[str]):
    """Ids of the chunks that :meth:`ragcachekit.RagCache.encode` was given, and of those whose KV is kept."""

    def __init__(self, ids: Iterable[str], kept: Iterable[str] | None = None) -> None:
        super().__init__(ids)
        self.kept = list(self if kept is None else kept)


class Chunks:
    """The chunks of one engine; its methods are those of :class:`ragcachekit.RagCache`.

    What a :meth:`forget` drops while other work goes on is neither stored nor registered by that work.
    """

    def __init__(self, components: EngineComponents) -> None:
        self._parts, self._parser, self._planner = components, components.parser, components.planner
        self.query_caches: WeakSet[CachedRetrieval[Any]] = WeakSet()
        self.registering = Lock()  # held while a forget ends
        self._warned = set[str]()

    def register(self, texts: Iterable[str], namespace: str, sources: Sequence[str | None] | None) -> int:
        """Search prompts for these texts; returns how many can be found."""
        since = self._parts.forgets.epoch  # before the texts are read: what gives them may forget
        texts = strings(texts, "texts")
        self._note_sources(texts, sources, namespace, since)
        self._unless_forgotten(self._planner.companions.register, texts, namespace, since)
        return self._unless_forgotten(self._parser.register, texts, namespace, since)

    def prefetch(
        self, chunks: Iterable[str], namespace: str, system: str | None, policy: SelectionPolicy
    ) -> None:
        """Begin to load chunks from slow tiers, in the background."""
        since = self._parts.forgets.epoch
        texts = strings(chunks, "chunks")
        self._unless_forgotten(self._parser.special_tokens.add, texts, namespace, since)
        if policy.reads_cache and self._parts.loads is not None:
            find = self._planner.prefetch_keys
            self._parts.loads.prefetch(lambda: find(texts, namespace, policy, system))

    def cached_first(self, texts: Iterable[str], namespace: str) -> list[int]:
        """Numbers of the texts, those that continue the longest cached beginning first."""
        texts, tree = strings(texts, "texts"), self._parts.tree
        order, last = list(range(len(texts))), self._planner.last_prompts
        system, common = last.last(namespace), last.common(namespace)
        if tree is None or system is None or len(texts) < 2:
            return order
        numbers = dict[str, list[int]]()
        for number, text in enumerate(texts):
            for ids in filter(None, {self._parser.chunk_ids(form) for form in forms(text)}):
                numbers.setdefault(chunk_id(ids, namespace), []).append(number)
        first = tree.longest_chain(self._parts.fingerprint, namespace, system, len(common), numbers)
        order.sort(key=lambda number: first.index(number) if number in first else len(first))
        return order

    def encode(
        self,
        texts: Sequence[str],
        namespace: str,
        system: str | None,
        prompt: PromptLike | None,
        sources: Sequence[str | None] | None,
        progress: bool,
        since: int,
        retain: float,
    ) -> EncodedIds:
        """As :meth:`ragcachekit.RagCache.encode`; ``since`` is the epoch before the texts were read."""
        encoder = self._parts.background_encoder
        if not self._planner.unchanged():
            raise ModelChanged(MODEL_CHANGED)
        self._note_sources(texts, sources, namespace, since)
        self._unless_forgotten(self._planner.companions.register, texts, namespace, since)
        if prompt is not None:
            if system is not None:
                raise ValueError("give encode system= or prompt=, not both: the prompt has the system text")
            self._unless_forgotten(self._parser.register, texts, namespace, since)
            self._planner.observe(self._parser.parse(prompt, namespace))
        if self._parts.grade.name == "prefix":  # chunks have no KV of their own
            ids = [chunk_id(self._parser.chunk_ids(text), namespace) for text in texts]
            self._register_named(texts, ids, namespace, since)
            return EncodedIds(ids)
        policy = self._parts.resolve(self._parts.policy, namespace).policy
        knows_system = system is not None or self._planner.last_prompts.last(namespace) is not None
        items = self._planner.missing(texts, namespace, policy, system, since)
        self._register_named(texts, [item.key.chunk_id for item in items], namespace, since)
        if not knows_system and any(is_average(item.key) for item in items):
            self._warn("encode knows no text before the first chunk: give prompt=, or ask a question first")
        lacking = [item for item in items if is_average(item.key) or not self._is_stored(item)]
        todo = [item for item in encoder.complete(lacking) if not self._is_stored(item)]
        if isinstance(self._parts.store, NullStore):
            self._warn(
                "encode keeps nothing: the store has no tier; give StoreConfig host_bytes or a disk_path"
            )
        with tqdm(total=sum(len(i.token_ids) for i in todo), unit="tok", disable=not progress) as bar:
            encoder.now(todo, lambda _, kv: self._encoded(kv.tokens, bar.update))
        for item in items if retain else ():
            self._parts.store.retain(self._planner.variants.average(item.key) or item.key, retain)
        kept = EncodedIds(
            [item.key.chunk_id for item in items],
            [item.key.chunk_id for item in items if self._is_stored(item)],
        )
        if len(kept.kept) < len(kept) and not isinstance(self._parts.store, NullStore):
            log.warning(
                "encode kept the KV of %d of %d chunks: raise host_bytes or disk_bytes, give a disk_path, or "
                "encode fewer (failed_writes in stats(): what a tier refused)",
                *(len(kept.kept), len(kept)),
            )
        return kept

    def _register_named(self, texts: Sequence[str], ids: Sequence[str], namespace: str, since: int) -> None:
        register = partial(self._parser.register, ids=dict(zip(texts, ids, strict=True)))
        self._unless_forgotten(register, texts, namespace, since)

    def _is_stored(self, item: Missing) -> bool:
        return is_stored(item, self._parts.store, self._planner.variants)

    def tune(self, prompts: Iterable[PromptLike] | None, namespace: str, progress: bool) -> TuneReport:
        """Choose encoder and policy of ``auto`` now."""
        if not self._planner.unchanged():
            raise ModelChanged(MODEL_CHANGED)
        if self._parts.deterministic:
            raise ValueError("nothing to choose: deterministic=True keeps one policy and one encoder")
        if self._parts.grade.name == "prefix":
            raise ValueError(f"nothing to choose: only exact beginnings are reused: {self._parts.grade.why}")
        asked = None if prompts is None else [self._check_prompt(prompt, namespace) for prompt in prompts]
        return self._parts.auto.tune(asked, namespace, progress)

    def forget(
        self, namespace: str, ids: Iterable[str] | None = None, texts: Iterable[str] | None = None
    ) -> int:
        """Drop chunks and texts, and KV that was computed after them, from all tiers; with neither, all."""
        if ids is None and texts is None:
            self._forget_results(namespace, None)
            return self._forget(namespace, None, (), None)
        ids, texts = strings(ids or (), "ids"), strings(texts or (), "texts")
        named, bare = frozenset(ids), frozenset(text.strip() for text in texts)
        chunk_ids = self._parser.chunk_ids

        def is_forgotten(text: str) -> bool:
            if text.strip() in bare:
                return True
            return bool(named) and any(chunk_id(chunk_ids(form), namespace) in named for form in forms(text))

        self._forget_results(namespace, is_forgotten)
        every = [form for text in texts for form in forms(text)]
        if not every:
            return self._forget(namespace, named, (), None)
        decode = partial(self._parser.tokens.decode, special=True)
        decoded = [decode(self._parser.tokens.plain(form)) for form in every]
        also = {chunk_id(chunk_ids(form), namespace) for form in every}
        return self._forget(namespace, named | also, texts, ForgottenTexts([*every, *decoded], decode))

    # -- steps -------------------------------------------------------------------------------------

    def _check_prompt(self, prompt: PromptLike, namespace: str) -> CheckPrompt:
        parsed = self._parser.parse(prompt, namespace)
        self._planner.prepare(parsed, open_policy("full"))  # notes the prompt, and refuses one too long
        return CheckPrompt(parsed.segments, parsed.texts)

    def _encoded(self, tokens: int, update: Callable[[int], object]) -> None:
        update(tokens)
        if self._parts.cost.needed:  # no request waits here
            attempt(self._parts.cost.measure)

    def _warn(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            log.warning("%s", message)

    def _unless_forgotten(
        self, use: Callable[[str, list[str]], _Item], texts: Sequence[str], namespace: str, since: int
    ) -> _Item:
        """Apply ``use`` to the texts that were not forgotten since; no forget ends meanwhile."""
        forgot = self._parts.forgets.forgot_text
        with self.registering:
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
        note = self._planner.companions.note_source
        for source in {source: None for source in sources if source is not None}:
            of_it = [text for text, own in zip(texts, sources, strict=True) if own == source]
            self._unless_forgotten(partial(note, source), of_it, namespace, since)

    def _forget_results(self, namespace: str, is_forgotten: Callable[[str], bool] | None) -> None:
        # Before the registry: a retriever registers what it found only while nothing was forgotten since.
        for cache in list(self.query_caches):
            try:
                cache.forget_texts(namespace, is_forgotten)
            except Exception:  # the KV is dropped all the same
                log.exception("cached search results could not be forgotten; clear the retriever's cache")

    def _forget(
        self, namespace: str, ids: frozenset[str] | None, texts: Sequence[str], within: ForgottenTexts | None
    ) -> int:
        """Drop entries while none is stored; work begun before this counts as out of date afterwards."""
        forgets = self._parts.forgets
        with forgets.storing, forgets.storing_in_tree:
            try:
                return self.drop(namespace, ids, within)
            finally:  # also where a tier raised
                with self.registering:
                    try:  # before the epoch: work that begins with the next one has no such neighbour
                        self._planner.forget(namespace, ids, within)
                        self._parser.forget(namespace, None if ids is None else texts)
                        named = self._parser.registry.named(namespace)
                        for name, text in list(named.items()):
                            if name in (ids or ()) or (within is not None and within.in_text(text)):
                                del named[name]
                    finally:
                        forgets.add(namespace, ids, texts, within)
                        self._parts.auto.forget(namespace, ids is None, within)

    def drop(self, namespace: str, ids: frozenset[str] | None, within: ForgottenTexts | None) -> int:
        """Drop entries from every tier; where one raises, the others have dropped theirs."""
        parts, unread, from_tree = self._parts, None, 0
        if ids is not None and within is not None:
            try:
                ids |= self._holding(namespace, ids, within)
            except Exception as error:
                unread = error
        self._planner.variants.forget(namespace, ids)
        parts.background_encoder.misses.forget(namespace, ids)
        try:
            from_store = parts.store.forget(namespace, ids)
        finally:
            if parts.loads is not None:  # after the store: what is opened in between goes too
                parts.loads.loader.forget(namespace, ids)
            if parts.tree is not None:
                from_tree = parts.tree.forget(namespace, ids, *([] if within is None else [within]))
        if unread is not None:
            raise StoreError(
                f"the store could not be searched for the texts, and may hold them; forget again: {unread}"
            ) from unread
        return from_tree + from_store

    def _holding(self, namespace: str, gone: frozenset[str], within: ForgottenTexts) -> frozenset[str]:
        """Ids of chunks and texts that hold a forgotten text, alone or with what they were encoded after."""
        parser, store = self._parser, self._parts.store
        found = {
            chunk_id(parser.chunk_ids(text), namespace)
            for text in parser.registry.texts(namespace)
            if within.in_text(text)
        }
        system = self._planner.last_prompts.last(namespace)
        if system is not None and within.within(system):
            found.add(chunk_id(system, namespace))
        keys, unlisted = list(store.keys()), max((record.entries for record in store.stats()), default=0)
        # Those with the shortest context first: their ids account for entries encoded after them.
        for key in sorted((key for key in keys if key.namespace == namespace), key=lambda k: len(k.context)):
            if concerns(key, namespace, gone | found):
                continue
            token_ids = token_ids_of(store.sums(key) or {})
            if token_ids is None or within.within(token_ids):  # or nobody can tell
                found.add(whole_id(key.chunk_id))
        if unlisted > len(keys):
            log.warning(
                "a tier does not list its entries: of %d, those that hold a forgotten text are known where "
                "they are registered or in other tiers; forget the namespace to be sure",
                unlisted,
            )
        return frozenset(found)


def is_stored(item: Missing, store: KVStore, known: VariantPool) -> bool:
    """Whether its entry is stored, or another mean of two contexts."""
    mean = known.average(item.key) if isinstance(item.encoding, AverageEncoding) else None
    key = item.key if mean is None else mean
    if key not in store:
        return False
    one = isinstance(item.encoding, AverageEncoding) and not item.encoding.neighbours
    return mean is None or one or SENSITIVITY in (store.sums(mean) or {})
