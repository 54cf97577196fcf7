"""From a user's prompt to a plan: segment, tokenise, look up, choose rows."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ragcachekit.encode.neighbours import Neighbours, TokenNeighbours
from ragcachekit.engine.prompt_segmenter import PromptLike, PromptSegmenter
from ragcachekit.errors import PromptTooLong
from ragcachekit.model.encoding import Ids
from ragcachekit.model.identity.watch import ModelWatch
from ragcachekit.model.kv import SENSITIVITY, ChunkKV
from ragcachekit.model.rope.rotation import Rope
from ragcachekit.plan.encodings import IN_PROMPT, Encodings, TokenSegment
from ragcachekit.plan.estimate import Estimator
from ragcachekit.plan.link_plan import LinkPlan, Missing
from ragcachekit.plan.lookup import Fetch
from ragcachekit.plan.plan import make_plan
from ragcachekit.plan.prefetch_keys import LastPrompts, is_chunk_id, prefetch_keys
from ragcachekit.plan.prefix_match import PrefixMatcher
from ragcachekit.plan.request import PromptRequest
from ragcachekit.plan.variants import open_pool
from ragcachekit.policies.base import SelectionPolicy
from ragcachekit.store.base import KVStore
from ragcachekit.types import KVKey, Prompt

log = logging.getLogger(__name__)

MODEL_CHANGED = (
    "the model changed since this RagCache was made (weights, adapter, dtype or attention "
    "implementation); make a new RagCache around it"
)


JOINT = "\n\n"
"""Text between a chunk and the neighbours that it is encoded behind, as between chunks of most chains."""


class PromptPlanner(PromptSegmenter):
    """Plans prompts for one model and one store.

    ``encoder`` None stands for the policy's own. ``neighbours`` maps namespaces to the source of neighbours
    for the encoder ``similar:n``. ``fetch`` returns the search for one prompt's entries; by default they are
    read from ``store``. ``tree`` matches exact beginnings of past prompts.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        rope: Rope,
        store: KVStore,
        fingerprint: str,
        encoder: str | None,
        neighbours: Mapping[str, Neighbours] | None = None,
        fetch: Callable[[], Fetch] | None = None,
        tree: PrefixMatcher | None = None,
    ) -> None:
        super().__init__(tokenizer)
        self.context = rope.context
        self._rope, self._store = rope, store
        self._fetch = fetch or (lambda: Fetch(store))
        self._tree = tree
        self.last_prompts = LastPrompts()
        self._fingerprint = fingerprint
        self._encoder = encoder
        self.variants = open_pool(store)
        self.neighbours = TokenNeighbours(neighbours or {}, self.chunk_ids)
        self._bos = self.bos(model)
        self._joint = self._tokens.text(JOINT, first=False) if self._tokens else ()
        self._watch = ModelWatch(model)
        self._identity = self._watch.state()

    def unchanged(self) -> bool:
        """Whether the model is still the one whose fingerprint was taken."""
        return self._watch.state() == self._identity

    def encodings(
        self,
        policy: SelectionPolicy,
        near: Callable[[Ids, bool], Sequence[Ids]] = lambda _chunk, _by_document: (),
    ) -> Encodings:
        """Encodings for ``policy``.

        ``near`` returns a chunk's neighbours as token ids; it is told whether those of its document count
        more than those that were registered with it.
        """
        if policy.encoder and self._encoder not in (None, policy.encoder):
            raise ValueError(
                f"policy {policy.name} is defined over encoder {policy.encoder}, not {self._encoder}"
            )
        name = policy.encoder or self._encoder or "standalone"
        by_document = not name.startswith("average")
        return Encodings(name, self._rope, self._bos, lambda ids: near(ids, by_document), self._joint)

    def register(self, namespace: str, texts: Sequence[str]) -> int:
        """Search the namespace's prompts for these texts; returns how many are long enough."""
        self.special_tokens.add(namespace, texts)
        return self.registry.add(namespace, texts)

    def note_stored(self, key: KVKey, kv: ChunkKV) -> None:
        """Record that an entry is in the store."""
        if key.encoding.partition("@")[0] == IN_PROMPT:
            self.variants.add(key, kv)
        averages = self.variants.averages
        known = averages.stored_for(key)
        if known not in (None, key) and SENSITIVITY not in kv.sums and known in self._store:
            self._store.evict(key)  # a prompt's own rows, that came after a mean or other rows
        elif (replaced := averages.add(key)) is not None:
            self._store.evict(replaced)

    def observe(self, prompt: PromptLike, namespace: str) -> None:
        """Take the text before the prompt's first chunk for the last one used; ValueError without chunks."""
        found = self.segment(prompt, namespace)
        segments = self.tokenise(found.prompt, isinstance(prompt, str | Prompt))
        if not any(segment.is_chunk for segment in segments):
            raise ValueError(
                f"prompt= has no chunk: {found.fallback or self.registry.nothing_found(namespace)}"
            )
        self.last_prompts.observe(namespace, segments)

    def request(
        self, prompt: PromptLike, namespace: str, policy: SelectionPolicy, epoch: int = 0
    ) -> PromptRequest:
        """As :meth:`waiting`, with its look-ups begun."""
        return self.look_up(self.waiting(prompt, namespace, policy, epoch))

    def waiting(
        self, prompt: PromptLike, namespace: str, policy: SelectionPolicy, epoch: int = 0
    ) -> PromptRequest:
        """Segment and tokenise one prompt, and name its chunks' keys; ``epoch`` is that of the forgets.

        Nothing is looked up before :meth:`look_up`. Raises ValueError or TypeError for an empty prompt or
        another type, and PromptTooLong.
        """
        segmentation = self.segment(prompt, namespace)
        texts: dict[Ids, str] = {}
        notes: list[str] = []
        # Chat templates write their own BOS; a string or segments of text get the tokenizer's.
        segments = self.tokenise(segmentation.prompt, isinstance(prompt, str | Prompt), texts)
        count = sum(len(segment.token_ids) for segment in segments)
        if count == 0:
            raise ValueError("the prompt is empty")
        if count >= self.context:
            raise PromptTooLong(
                f"the prompt has {count} tokens, the model's context is {self.context}; "
                "retrieve fewer or shorter chunks"
            )
        self.last_prompts.observe(namespace, segments)
        self.neighbours.observe(namespace, list(texts.values()))
        origins = Counter[str]()

        def near(ids: Ids, by_document: bool) -> Sequence[Ids]:
            return self._near(texts.get(ids), namespace, notes, by_document, origins)

        encodings = self.encodings(policy, near)
        fallback = segmentation.fallback
        if fallback is not None or not policy.reads_cache:
            request = PromptRequest(tuple(segments), policy, encodings.name, namespace, fallback=fallback)
        else:
            request = PromptRequest.of(
                segments, policy, encodings, Fetch(self._store), self._fingerprint, namespace
            )
            if not isinstance(prompt, Prompt) and not any(segment.is_chunk for segment in segments):
                notes.append(self.registry.nothing_found(namespace))
        return replace(
            request,
            notes=(*segmentation.prompt.notes, *notes),
            epoch=epoch,
            texts=texts,
            neighbours=", ".join(f"{origin}: {count}" for origin, count in origins.most_common()),
        )

    def look_up(self, request: PromptRequest) -> PromptRequest:
        """A :meth:`waiting` request with look-ups that begin now; without any if the model has changed."""
        if not self.unchanged():
            return replace(request, fallback=MODEL_CHANGED)
        if not request.reads_cache:
            return request
        return request.looked_up(self._fetch(), self._fingerprint, self._tree)

    def estimator(self, request: PromptRequest) -> Estimator:
        """Estimates of what a :meth:`waiting` request would reuse."""
        return Estimator(request, self._store, self.variants, self._fingerprint, self._tree)

    def request_over(
        self,
        store: KVStore,
        segments: Sequence[TokenSegment],
        texts: Mapping[Ids, str],
        policy: SelectionPolicy,
        namespace: str,
    ) -> PromptRequest:
        """A tokenised prompt whose entries are in ``store`` alone; ``texts`` are its chunks' by their ids.

        Chunks that were registered by this very prompt would be behind each other in its order, and means of
        them nearly exact: they are taken in reverse.
        """

        def near(ids: Ids, by_document: bool) -> Sequence[Ids]:
            found = self._near(texts.get(ids), namespace, [], by_document)
            return found[::-1] if encodings.averages else found

        encodings = self.encodings(policy, near)
        return PromptRequest.of(segments, policy, encodings, Fetch(store), self._fingerprint, namespace)

    def plan(self, request: PromptRequest, without: frozenset[KVKey] = frozenset()) -> LinkPlan:
        """The complete plan of a request, without those entries that could not be loaded."""
        return make_plan(request, self.variants, without)

    def prefetch_keys(
        self, chunks: Sequence[str], namespace: str, policy: SelectionPolicy, system: str | None
    ) -> list[KVKey]:
        """Keys that a prompt of these chunks, texts or ids, would look up.

        The text before them is ``system``, or the last one used in the namespace.
        """
        before = (self.last_prompts.last(namespace) or ()) if system is None else self.text_before(system)
        known: dict[Ids, str] = {}
        items: list[Ids | str] = []
        for chunk in chunks:
            items.append(chunk if is_chunk_id(chunk) else self.chunk_ids(chunk))
            if not isinstance(items[-1], str):
                known[items[-1]] = chunk
        encodings = self.encodings(
            policy, lambda ids, by_document: self._near(known.get(ids), namespace, [], by_document)
        )
        return prefetch_keys(items, encodings, before, self._fingerprint, namespace, self.variants)

    def forget(self, namespace: str, ids: frozenset[str] | None, texts: Sequence[str]) -> None:
        """Forget chunks and their texts; with None all of the namespace, including its last prompt."""
        self.neighbours.forget(namespace, ids, texts)
        if ids is not None:
            self.registry.discard(namespace, texts)
            self.special_tokens.discard(namespace, texts)
            return
        self.registry.clear(namespace)
        self.special_tokens.clear(namespace)
        self.last_prompts.forget(namespace)

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
        than the model's context, or a ``system`` that is needed and not known.
        """
        chunks = [self.chunk_ids(text) for text in texts]
        known = dict(zip(chunks, texts, strict=True))
        encodings = self.encodings(
            policy,
            lambda ids, first: self.neighbours.of(known[ids], namespace, first)[1] if ids in known else (),
        )
        behind = self._system_ids(encodings, system, namespace)
        out = []
        for number, ids in enumerate(chunks):
            encoding, context = encodings.encoding(ids, behind)
            width = len(encoding.behind) + len(ids)
            if not ids:
                raise ValueError(f"chunk {number} is empty; drop it before encoding")
            if width > self.context:
                raise ValueError(
                    f"chunk {number} has {len(ids)} tokens, more than the model's context ({self.context}); "
                    "cut it into smaller ones"
                )
            key = encodings.key(ids, encoding, context, self._fingerprint, namespace, width)
            out.append(Missing(key, ids, encoding, epoch))
        return out

    def _system_ids(self, encodings: Encodings, system: str | None, namespace: str) -> Ids:
        if not encodings.behind_system:
            return ()
        known = self.last_prompts.last(namespace) if system is None else self.text_before(system)
        if known is None:
            raise ValueError(
                f"the encoder {encodings.name!r} needs system=, the text before the prompt's first chunk"
            )
        return known

    def _near(
        self,
        text: str | None,
        namespace: str,
        notes: list[str],
        by_document: bool,
        origins: Counter[str] | None = None,
    ) -> Sequence[Ids]:
        """Neighbours of a prompt's chunk; an index that fails costs the better encoding, not the answer."""
        if text is None:
            return ()
        try:
            origin, near = self.neighbours.of(text, namespace, by_document)
            if origins is not None:
                origins[origin or "none"] += 1
            return near
        except Exception as error:
            log.warning("the neighbours of a chunk could not be looked up", exc_info=True)
            notes.append(f"a chunk's neighbours could not be looked up ({error!r}): taken to have none")
            return ()
