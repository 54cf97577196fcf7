"""The planner: from a parsed prompt to a plan, and from chunks to the entries to encode."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ragcachekit.errors import PromptTooLong
from ragcachekit.json_store import JsonStore
from ragcachekit.model.identity import ModelGuard
from ragcachekit.model.kv import ChunkKV, KVLayout
from ragcachekit.model.rope import Rope
from ragcachekit.model.snapshots import SnapshotLayout
from ragcachekit.plan.companions import Companions, Neighbours
from ragcachekit.plan.encodings import Encodings, Fetch, Wanted, block_size, keys_for
from ragcachekit.plan.link_plan import LinkPlan, Missing, PromptRequest, make_plan, missing_of
from ragcachekit.plan.prefix_match import match_prefix, path_of
from ragcachekit.plan.variants import IN_PROMPT, SHARE, VariantPool, is_variant
from ragcachekit.policies.base import SelectionPolicy
from ragcachekit.prefix_tree.knowledge_tree import KnowledgeTree
from ragcachekit.prefix_tree.nodes import Root
from ragcachekit.prompt.parser import ParsedPrompt, PromptParser
from ragcachekit.prompt.segments import TokenSegment, token_count
from ragcachekit.prompt.tokenizer import common_prefix
from ragcachekit.store.base import KVStore
from ragcachekit.store.forgets import ForgottenTexts
from ragcachekit.store.remote import reported
from ragcachekit.types import (
    DEFAULT_ENCODER,
    DEFAULT_NEIGHBOURS,
    Ids,
    KVKey,
    chunk_id,
    parse_encoder,
    whole_id,
)

log = logging.getLogger(__name__)

MAX_NAMESPACES = 1024  # whose last system text is known
WINDOW = 16  # prompts of a namespace that :meth:`LastPrompts.changing` is about
MODEL_CHANGED = (
    "the model changed since this RagCache was made (weights, adapter, dtype or attention "
    "implementation); make a new RagCache around it"
)


class LastPrompts:
    """The last :data:`WINDOW` system texts of the latest :data:`MAX_NAMESPACES` namespaces. Thread safe."""

    def __init__(self) -> None:
        self._known: dict[str, deque[Ids]] = {}
        self._lock = threading.Lock()

    def observe(self, namespace: str, system: Ids) -> None:
        """Record the system text of a prompt with chunks."""
        with self._lock:
            self._known[namespace] = seen = self._known.pop(namespace, deque(maxlen=WINDOW))
            seen.append(system)
            if len(self._known) > MAX_NAMESPACES:
                del self._known[next(iter(self._known))]

    def suggest(self, namespace: str, system: Ids) -> None:
        """Take a system text for the last one where no prompt was observed."""
        with self._lock:
            self._known.setdefault(namespace, deque([system], WINDOW))

    def last(self, namespace: str) -> Ids | None:
        """Token ids of the system text; None before any prompt."""
        known = self._known.get(namespace)
        return None if known is None else known[-1]

    def changing(self, namespace: str) -> bool:
        """Whether more than half of the last :data:`WINDOW` prompts had a text of their own."""
        with self._lock:
            return len(set(self._known.get(namespace, ()))) > WINDOW // 2

    def common(self, namespace: str) -> Ids:
        """Tokens that the last :data:`WINDOW` system texts begin with; others may be a chunk's metadata."""
        with self._lock:
            return common_prefix(*self._known.get(namespace, ((),)))

    def forget(self, namespace: str) -> None:
        with self._lock:
            self._known.pop(namespace, None)


class Planner:
    """Plans prompts, and names the entries of chunks, for one model and one store.

    ``encoder`` None is the policy's own, or the default one. ``fetch`` makes the look-ups of one prompt.
    Unless the model ``is_linked``, only beginnings of prompts are looked up. ``deterministic`` allows only
    encodings that a prompt's own text decides, under one key for each chunk.
    """

    def __init__(
        self,
        model: Any,
        parser: PromptParser,
        *,
        rope: Rope,
        store: KVStore,
        fingerprint: str,
        encoder: str | None,
        neighbours: Mapping[str, Neighbours] | None = None,
        same_source: bool = False,
        fetch: Callable[[], Fetch] | None = None,
        tree: KnowledgeTree | None = None,
        layout: KVLayout | SnapshotLayout | None = None,
        is_linked: bool = True,
        deterministic: bool = False,
    ) -> None:
        self.context, self.last_prompts = rope.context, LastPrompts()
        self._vocab = getattr(model.config.get_text_config(), "vocab_size", 1 << 31)
        kind, count = parse_encoder(encoder or "standalone")
        near = {"block": block_size(encoder), "nearest": count if kind == "similar" else 0}
        self.companions = Companions(neighbours or {}, parser.chunk_ids, same_source, **near)
        budget = int(SHARE * max((record.budget for record in store.stats()), default=0))
        self.variants = VariantPool(
            budget=budget, free=lambda key: store.discard(key, damaged=False), allow=self.companions.allow
        )
        self._parser, self._rope, self._store, self._tree = parser, rope, store, tree
        self._fingerprint, self._encoder, self._layout = fingerprint, encoder, layout
        self._is_linked, self._deterministic = is_linked, deterministic
        self._default = "system" if rope.depends_on_length or deterministic else DEFAULT_ENCODER
        self._pairs_chunks = encoder is None or encoder.partition(":")[0] in DEFAULT_NEIGHBOURS
        self._fetch = fetch or (lambda: Fetch(store))
        self._bos, self._joint = parser.bos(model), parser.blank_line
        self._guard = ModelGuard(model)
        self._identity = self._guard.state()

    def unchanged(self) -> bool:
        return self._guard.state() == self._identity

    def encodings(
        self, policy: SelectionPolicy, near: Callable[[Ids], Sequence[Ids]] = lambda _: ()
    ) -> Encodings:
        """Encodings for ``policy``; ``near`` returns a chunk's neighbours as token ids."""
        if policy.encoder and self._encoder not in (None, policy.encoder):
            raise ValueError(
                f"policy {policy.name} is defined over encoder {policy.encoder}, not {self._encoder}"
            )
        name = policy.encoder or self._encoder or self._default
        if self._deterministic and name.partition(":")[0] in (*DEFAULT_NEIGHBOURS, IN_PROMPT):
            raise ValueError(
                f"deterministic=True needs the encoder 'system', 'standalone' or 'sinks:n': under {name!r} "
                "what is kept of a chunk depends on other prompts"
            )
        if name == IN_PROMPT and self.companions.same_source:
            raise ValueError(
                "the encoder 'in-prompt' keeps chunks as they were after any other chunks, which "
                "companions='same-source' rules out; use 'average:2' or 'system' with it"
            )
        return Encodings(name, self._rope, self._bos, near, self._joint)

    # -- prompts -----------------------------------------------------------------------------------

    def observe(self, parsed: ParsedPrompt) -> None:
        """Note the text before the first chunk as the namespace's last; ValueError without chunks."""
        if not parsed.has_chunks:
            raise ValueError(f"prompt= has no chunk: {parsed.fallback or parsed.no_chunks or 'mark them'}")
        self.last_prompts.observe(parsed.namespace, Encodings.system_of(parsed.segments))

    def prepare(
        self, parsed: ParsedPrompt, policy: SelectionPolicy, epoch: int = 0, retain: float = 0.0
    ) -> PromptRequest:
        """Name the keys of a prompt's chunks; nothing is looked up before :meth:`look_up`.

        ``epoch`` is that of the forgets when the prompt came; ``retain`` is for all entries. PromptTooLong.
        """
        namespace, segments, count = parsed.namespace, parsed.segments, len(parsed.token_ids)
        if count >= self.context:
            raise PromptTooLong(
                f"the prompt has {count} tokens, the model's context is {self.context}; "
                "retrieve fewer or shorter chunks"
            )
        if count and not 0 <= min(parsed.token_ids) <= max(parsed.token_ids) < self._vocab:
            raise ValueError(f"the prompt has token ids that the model lacks: it has 0 to {self._vocab - 1}")
        if parsed.has_chunks:
            self.last_prompts.observe(namespace, Encodings.system_of(segments))
        if self._pairs_chunks:
            self.companions.observe(namespace, list(parsed.texts.values()))
        notes, wanted, place = list[str](), tuple[Wanted, ...](), None
        encodings = self.encodings(policy, lambda ids: self._near(parsed.texts.get(ids), namespace, notes))
        fallback = parsed.fallback or self._rope.why_not_linked(count)
        if fallback is None and policy.reads_cache:
            if self._is_linked:
                wanted = tuple(encodings.wanted(segments, self._fingerprint, namespace))
            if self.companions.same_source:  # a prompt's own rows come after any chunks
                wanted = tuple(replace(want, in_place=None) for want in wanted)
            if self._deterministic:  # not rows of the whole chunk, if it happens to be there
                wanted = tuple(replace(want, whole=None) if want.exact else want for want in wanted)
            if retain:
                wanted = tuple(replace(want, retain=max(retain, want.retain)) for want in wanted)
            if self._tree is not None:
                regime = str(self._rope.regime(count)) if self._rope.depends_on_length else ""
                path = path_of(segments, wanted, namespace)
                while not self._is_linked and sum(step.tokens for step in path) > count - 2:
                    path = path[:-1]  # the prompt's last tokens are always computed
                place = Root(self._fingerprint, namespace, regime), path
            notes += [parsed.no_chunks] if parsed.no_chunks else []
        return PromptRequest(
            segments,
            policy,
            encodings.name,
            namespace,
            wanted,
            fetch=Fetch(self._store),
            place=place,
            notes=(*parsed.notes, *notes),
            fallback=fallback,
            epoch=epoch,
            settles=self.last_prompts.changing(namespace),
            texts=parsed.texts,
        )

    def look_up(self, request: PromptRequest) -> PromptRequest:
        """Begin the look-ups of a request that was prepared; without any if the model has changed.

        Only chunks after the match in the tree are looked up in the store (FusionRAG 4.1, alternative path).
        """
        if request.retries and self._tree is not None:
            self._tree.check_gpu()
        if not self.unchanged():
            return replace(request, fallback=MODEL_CHANGED)
        if not request.reads_cache:
            return request
        request = replace(request, fetch=self._fetch())
        if self._tree is None or request.place is None:
            return request
        ids = frozenset(whole_id(i) for want in request.wanted for i in (*want.before, want.key.chunk_id))
        if not self._is_linked:
            ids = frozenset(i for step in request.place[1] for i in step.ids)
        with reported(request.fetch.failures):
            match = match_prefix(
                self._tree, request.place, request.token_ids, request.segments, ids, self._layout
            )
        wanted = tuple(want for want in request.wanted if want.start >= match.tokens)
        return replace(request, wanted=wanted, prefix_match=match)

    def plan(self, request: PromptRequest, without: frozenset[KVKey] = frozenset()) -> LinkPlan:
        return make_plan(request, self.variants, without)

    def encode_first(
        self,
        request: PromptRequest,
        without: frozenset[KVKey],
        encode: Callable[[Sequence[Missing], Callable[[KVKey, ChunkKV], object]], object],
    ) -> frozenset[KVKey]:
        """Have the entries that a request lacks encoded for it: it is linked as when all are kept.

        Returns those of ``without`` that it has to do without.
        """
        fetch, wanted = request.fetch, [want for want in request.wanted if request.may_reuse(want)]
        # A part's own rows are there only if an earlier prompt began with it.
        fetch.lose([*without, *(want.key for want in wanted if want.to_encode is not want)])
        items = {item.key: item for item in (missing_of(request, want) for want in wanted)}
        absent = {
            key: item
            for key, item in items.items()
            if key not in fetch.given and fetch.get(key, len(item.token_ids)) is None
        }
        encode(list(absent.values()), fetch.give)
        return without - absent.keys()

    def estimator(self, request: PromptRequest) -> Estimator:
        return Estimator(request, self._store, self.variants, self._tree)

    def request_over(
        self,
        store: KVStore,
        segments: Sequence[TokenSegment],
        texts: Mapping[Ids, str],
        policy: SelectionPolicy,
        namespace: str,
    ) -> PromptRequest:
        """A tokenised prompt whose entries are in ``store`` alone; ``texts`` are its chunks' by their ids.

        Chunks that this very prompt registered would be encoded after each other in its order, which makes
        their means nearly exact here: neighbours are taken in reverse.
        """

        def near(ids: Ids) -> Sequence[Ids]:
            found = self._near(texts.get(ids), namespace, [])
            return found[::-1] if encodings.averages else found

        encodings = self.encodings(policy, near)
        wanted = tuple(encodings.wanted(segments, self._fingerprint, namespace))
        return PromptRequest(tuple(segments), policy, encodings.name, namespace, wanted, fetch=Fetch(store))

    # -- chunks ------------------------------------------------------------------------------------

    def missing(
        self,
        texts: Sequence[str],
        namespace: str,
        policy: SelectionPolicy,
        system: str | None,
        epoch: int = 0,
    ) -> list[Missing]:
        """What to encode for each text, stored or not, for work that began at ``epoch``.

        ``system`` is by default the last one used in the namespace. ValueError for an empty chunk, one longer
        than the model's context, or a ``system`` that the encoder needs and that is not known.
        """
        chunks = [self._parser.chunk_ids(text) for text in texts]
        known = dict(zip(chunks, texts, strict=True))
        encodings = self.encodings(policy, lambda ids: self.companions.of(known[ids], namespace))
        before: Ids | None = ()
        if encodings.needs_system:
            before = self.last_prompts.last(namespace) if system is None else self._parser.system_ids(system)
        if before is None and encodings.averages:
            before = ()
        if before is None:
            raise ValueError(
                f"the encoder {encodings.name!r} needs system=, the text before the prompt's first chunk"
            )
        out = []
        for number, ids in enumerate(chunks):
            if not ids:
                raise ValueError(f"chunk {number} is empty; drop it before encoding")
            encoding, context = encodings.encoding(ids, before)
            width = len(encoding.before) + len(ids)
            if width > self.context:
                raise ValueError(
                    f"chunk {number} has {len(ids)} tokens, more than the model's context ({self.context}); "
                    "cut it into smaller ones"
                )
            name = encodings.full_name(encoding.name, width)
            names = tuple(chunk_id(one, namespace) for one in context)
            key = KVKey(self._fingerprint, namespace, chunk_id(ids, namespace), name, names)
            out.append(Missing(key, ids, encoding, epoch))
        return out

    def prefetch_keys(
        self, texts: Sequence[str], namespace: str, policy: SelectionPolicy, system: str | None
    ) -> list[KVKey]:
        """Keys that a prompt of these chunks after ``system``, or the last such text, would look up first."""
        known = self.last_prompts.last(namespace) if system is None else self._parser.system_ids(system)
        chunks = {self._parser.chunk_ids(text): text for text in texts}
        segments = [TokenSegment(known or (), False), *(TokenSegment(ids, True) for ids in chunks)]
        encodings = self.encodings(policy, lambda ids: self._near(chunks.get(ids), namespace, []))
        wanted = encodings.wanted(segments, self._fingerprint, namespace)
        return [key for want in wanted for key in keys_for(want, self.variants)[:2]]

    def retain(self, request: PromptRequest) -> None:
        """Retain the entries that served a request, for its own times."""
        for want in request.wanted:
            for key in keys_for(want, self.variants) if want.retain else ():
                self._store.retain(key, want.retain)

    def note_stored(self, key: KVKey, kv: ChunkKV) -> None:
        """Record that an entry is in the store."""
        if is_variant(key):
            self.variants.add(key, kv)
        if (replaced := self.variants.add_average(key)) is not None:
            self._store.discard(replaced, damaged=False)

    def recall(self, policy: SelectionPolicy, folder: Path | None) -> None:
        """Note what the store, and its ``folder``, hold of chunks in other contexts for ``policy``."""
        variants = self.encodings(policy).name == IN_PROMPT
        if variants and folder is not None:
            try:
                self.variants.saved = JsonStore(folder / "uses")
            except OSError as error:
                log.warning("the uses of variants will not outlive this process: %s", error)
        self.variants.recall(self._store, self._fingerprint, variants=variants)

    def forget(
        self, namespace: str, ids: frozenset[str] | None, within: ForgottenTexts | None = None
    ) -> None:
        """Forget chunks as neighbours; with None all of the namespace, including its last system text.

        The system text is forgotten, too, where ``within`` finds a text in it.
        """
        self.companions.forget(namespace, ids)
        last = self.last_prompts.last(namespace) or ()
        if ids is None or (within is not None and within.within(last)):
            self.last_prompts.forget(namespace)

    def _near(self, text: str | None, namespace: str, notes: list[str]) -> Sequence[Ids]:
        """Neighbours of a prompt's chunk; an index that fails costs the better encoding, not the answer."""
        try:
            return () if text is None else self.companions.of(text, namespace)
        except Exception as error:
            log.warning("the neighbours of a chunk could not be looked up", exc_info=True)
            notes.append(f"a chunk's neighbours could not be looked up ({error!r}): taken to have none")
            return ()


class Estimator:
    """What a request that was not looked up yet would reuse, by the keys in memory.

    No tensor is read and no access counted. Entries in slow tiers count as not cached. Tokens that a policy
    recomputes count as cached.
    """

    def __init__(
        self, request: PromptRequest, store: KVStore, variants: VariantPool, tree: KnowledgeTree | None
    ) -> None:
        self.tokens = token_count(request.segments)
        self._store, self._variants, self._tree = store, variants, tree
        self._place = request.place if request.reads_cache else None
        self._wanted = [want for want in request.wanted if request.may_reuse(want)]

    def rows(self) -> tuple[int, int]:
        """Prompt tokens with cached KV, and the others, at least one."""
        known = self._tree.known(*self._place) if self._tree and self._place else 0
        cached = known + sum(
            len(want.token_ids)
            for want in self._wanted
            if want.start >= known and any(map(self._store.in_memory, keys_for(want, self._variants)))
        )
        return cached, max(1, self.tokens - cached)

    def to_load(self) -> list[KVKey]:
        every = [keys_for(want, self._variants) for want in self._wanted]
        return [key for keys in every if not any(map(self._store.in_memory, keys)) for key in keys]
