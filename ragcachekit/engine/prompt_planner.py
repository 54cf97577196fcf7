"""From a user's prompt to a plan: segment, tokenise, look up, choose rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ragcachekit.encode.neighbours import Neighbours
from ragcachekit.engine.chunk_planner import ChunkPlanner
from ragcachekit.engine.prompt_segmenter import PromptLike
from ragcachekit.errors import PromptTooLong
from ragcachekit.model.encoding import Ids
from ragcachekit.model.rope.rotation import Rope
from ragcachekit.plan.encodings import TokenSegment
from ragcachekit.plan.estimate import Estimator
from ragcachekit.plan.link_plan import LinkPlan
from ragcachekit.plan.lookup import Fetch
from ragcachekit.plan.plan import make_plan
from ragcachekit.plan.prefix_match import PrefixMatcher
from ragcachekit.plan.request import PromptRequest
from ragcachekit.policies.base import SelectionPolicy
from ragcachekit.store.base import KVStore
from ragcachekit.types import KVKey, Prompt

MODEL_CHANGED = (
    "the model changed since this RagCache was made (weights, adapter, dtype or attention "
    "implementation); make a new RagCache around it"
)


class PromptPlanner(ChunkPlanner):
    """Plans prompts for one model and one store.

    ``fetch`` returns the search for one prompt's entries; by default they are read from ``store``. ``tree``
    matches exact beginnings of past prompts. The others are those of :class:`ChunkPlanner`.
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
        same_source: bool = False,
        fetch: Callable[[], Fetch] | None = None,
        tree: PrefixMatcher | None = None,
    ) -> None:
        super().__init__(
            model,
            tokenizer,
            rope=rope,
            store=store,
            fingerprint=fingerprint,
            encoder=encoder,
            neighbours=neighbours,
            same_source=same_source,
        )
        self._fetch = fetch or (lambda: Fetch(store))
        self._tree = tree

    def observe(self, prompt: PromptLike, namespace: str) -> None:
        """Take the text before the prompt's first chunk for the last one used; ValueError without chunks."""
        found = self.segment(prompt, namespace)
        segments = self.tokenise(prompt, found, {}).segments
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
        segments, remarks = self.tokenise(prompt, segmentation, texts)
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
            if self.neighbours.chunk_sources is not None:  # a prompt's own rows stand behind any chunks
                request = replace(request, wanted=tuple(replace(w, in_place=None) for w in request.wanted))
            if not isinstance(prompt, Prompt) and not any(segment.is_chunk for segment in segments):
                notes.append(self.registry.nothing_found(namespace))
        return replace(
            request,
            notes=(*segmentation.prompt.notes, *remarks, *notes),
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
