"""The planner: from a parsed prompt to a plan, and from chunks to the entries to encode."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ragcachekit.errors import PromptTooLong
from ragcachekit.model.identity import ModelGuard
from ragcachekit.model.kv import SENSITIVITY, ChunkKV
from ragcachekit.model.rope import Rope
from ragcachekit.plan.companions import Companions, LastPrompts, Neighbours
from ragcachekit.plan.encodings import IN_PROMPT, Encodings
from ragcachekit.plan.link_plan import LinkPlan, Missing
from ragcachekit.plan.lookup import Fetch
from ragcachekit.plan.plan import make_plan
from ragcachekit.plan.prefetch_keys import is_chunk_id, prefetch_keys
from ragcachekit.plan.prefix_match import PrefixMatcher
from ragcachekit.plan.request import Estimator, PromptRequest
from ragcachekit.plan.variants import open_pool
from ragcachekit.policies.base import SelectionPolicy
from ragcachekit.prompt.parser import ParsedPrompt, PromptParser
from ragcachekit.prompt.segments import TokenSegment
from ragcachekit.store.base import KVStore
from ragcachekit.store.forgets import ForgottenTexts
from ragcachekit.types import Ids, KVKey

log = logging.getLogger(__name__)

MODEL_CHANGED = (
    "the model changed since this RagCache was made (weights, adapter, dtype or attention "
    "implementation); make a new RagCache around it"
)


class Planner:
    """Plans prompts, and names the entries of chunks, for one model and one store.

    Parameters
    ----------
    parser : PromptParser
        Tokenises chunks as it does in prompts.
    encoder : str or None
        None: the policy's own.
    neighbours : mapping of str to Neighbours, optional
        Sources of neighbours by namespace, for the encoder ``similar:n``.
    same_source : bool
        Encode a chunk only after chunks of its own source.
    fetch : callable, optional
        Makes the look-ups of one prompt; by default they read ``store``.
    tree : PrefixMatcher, optional
        Matches exact beginnings of past prompts.
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
        tree: PrefixMatcher | None = None,
    ) -> None:
        self.context, self.last_prompts, self.variants = rope.context, LastPrompts(), open_pool(store)
        self.companions = Companions(neighbours or {}, parser.chunk_ids, same_source)
        self.variants.averages.allow = self.companions.allow
        self._parser, self._rope, self._store, self._tree = parser, rope, store, tree
        self._fingerprint, self._encoder = fingerprint, encoder
        self._fetch = fetch or (lambda: Fetch(store))
        self._bos, self._joint = parser.bos(model), parser.blank_line
        self._guard = ModelGuard(model)
        self._identity = self._guard.state()

    def unchanged(self) -> bool:
        """Whether the model is still the one whose fingerprint was taken."""
        return self._guard.state() == self._identity

    def encodings(
        self,
        policy: SelectionPolicy,
        near: Callable[[Ids], Sequence[Ids]] = lambda _: (),
    ) -> Encodings:
        """Encodings for ``policy``; ``near`` returns a chunk's neighbours as token ids."""
        if policy.encoder and self._encoder not in (None, policy.encoder):
            raise ValueError(
                f"policy {policy.name} is defined over encoder {policy.encoder}, not {self._encoder}"
            )
        name = policy.encoder or self._encoder or "standalone"
        if name == IN_PROMPT and self.companions.same_source:
            raise ValueError(
                "the encoder 'in-prompt' keeps chunks as they were after any other chunks, which "
                "companions='same-source' rules out; use 'average:3' or 'system' with it"
            )
        return Encodings(name, self._rope, self._bos, near, self._joint)

    # -- prompts -----------------------------------------------------------------------------------

    def observe(self, parsed: ParsedPrompt) -> None:
        """Note the text before the first chunk as the namespace's last; ValueError without chunks."""
        if not parsed.has_chunks:
            raise ValueError(f"prompt= has no chunk: {parsed.fallback or parsed.no_chunks or 'mark them'}")
        self.last_prompts.observe(parsed.namespace, Encodings.system_of(parsed.segments))

    def prepare(self, parsed: ParsedPrompt, policy: SelectionPolicy, epoch: int = 0) -> PromptRequest:
        """Name the keys of a prompt's chunks; nothing is looked up before :meth:`look_up`.

        ``epoch`` is that of the forgets when the prompt came. Raises PromptTooLong.
        """
        namespace, segments, count = parsed.namespace, parsed.segments, len(parsed.token_ids)
        if count >= self.context:
            raise PromptTooLong(
                f"the prompt has {count} tokens, the model's context is {self.context}; "
                "retrieve fewer or shorter chunks"
            )
        if parsed.has_chunks:
            self.last_prompts.observe(namespace, Encodings.system_of(segments))
        self.companions.observe(namespace, list(parsed.texts.values()))
        notes = list[str]()
        encodings = self.encodings(policy, lambda ids: self._near(parsed.texts.get(ids), namespace, notes))
        if parsed.fallback is not None or not policy.reads_cache:
            request = PromptRequest(segments, policy, encodings.name, namespace, fallback=parsed.fallback)
        else:
            request = PromptRequest.of(
                segments, policy, encodings, Fetch(self._store), self._fingerprint, namespace
            )
            if self.companions.same_source:  # a prompt's own rows come after any chunks
                request = replace(request, wanted=tuple(replace(w, in_place=None) for w in request.wanted))
            notes += [parsed.no_chunks] if parsed.no_chunks else []
        return replace(
            request,
            notes=(*parsed.notes, *notes),
            epoch=epoch,
            texts=parsed.texts,
        )

    def look_up(self, request: PromptRequest) -> PromptRequest:
        """Begin the look-ups of a request that was prepared; without any if the model has changed."""
        if not self.unchanged():
            return replace(request, fallback=MODEL_CHANGED)
        if not request.reads_cache:
            return request
        return request.looked_up(self._fetch(), self._fingerprint, self._tree)

    def plan(self, request: PromptRequest, without: frozenset[KVKey] = frozenset()) -> LinkPlan:
        """The complete plan of a request, without those entries that could not be loaded."""
        return make_plan(request, self.variants, without)

    def estimator(self, request: PromptRequest) -> Estimator:
        """Estimates of what a request that was prepared would reuse."""
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

        Chunks that this very prompt registered would be encoded after each other in its order, which makes
        their means nearly exact here: neighbours are taken in reverse.
        """

        def near(ids: Ids) -> Sequence[Ids]:
            found = self._near(texts.get(ids), namespace, [])
            return found[::-1] if encodings.averages else found

        encodings = self.encodings(policy, near)
        return PromptRequest.of(segments, policy, encodings, Fetch(store), self._fingerprint, namespace)

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
        than the model's context, or a ``system`` that is needed and not known.
        """
        chunks = [self._parser.chunk_ids(text) for text in texts]
        known = dict(zip(chunks, texts, strict=True))
        encodings = self.encodings(
            policy, lambda ids: self.companions.of(known[ids], namespace) if ids in known else ()
        )
        before = self._system_ids(encodings, system, namespace)
        out = []
        for number, ids in enumerate(chunks):
            encoding, context = encodings.encoding(ids, before)
            width = len(encoding.before) + len(ids)
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

    def prefetch_keys(
        self, chunks: Sequence[str], namespace: str, policy: SelectionPolicy, system: str | None
    ) -> list[KVKey]:
        """Keys that a prompt of these chunks, texts or ids, would look up.

        The text before them is ``system``, or the last one used in the namespace.
        """
        if system is None:
            before = self.last_prompts.last(namespace) or ()
        else:
            before = self._parser.system_ids(system)
        items = [chunk if is_chunk_id(chunk) else self._parser.chunk_ids(chunk) for chunk in chunks]
        texts = {ids: chunk for ids, chunk in zip(items, chunks, strict=True) if not isinstance(ids, str)}
        encodings = self.encodings(policy, lambda ids: self._near(texts.get(ids), namespace, []))
        return prefetch_keys(items, encodings, before, self._fingerprint, namespace, self.variants)

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

    def forget(
        self,
        namespace: str,
        ids: frozenset[str] | None,
        within: ForgottenTexts | None = None,
    ) -> None:
        """Forget chunks as neighbours; with None all of the namespace, including its last system text.

        The system text is forgotten, too, where ``within`` finds a text in it.
        """
        self.companions.forget(namespace, ids)
        last = self.last_prompts.last(namespace) or ()
        if ids is None or (within is not None and within.within(last)):
            self.last_prompts.forget(namespace)

    def _system_ids(self, encodings: Encodings, system: str | None, namespace: str) -> Ids:
        if not encodings.needs_system:
            return ()
        known = self.last_prompts.last(namespace) if system is None else self._parser.system_ids(system)
        if known is None:
            raise ValueError(
                f"the encoder {encodings.name!r} needs system=, the text before the prompt's first chunk"
            )
        return known

    def _near(self, text: str | None, namespace: str, notes: list[str]) -> Sequence[Ids]:
        """Neighbours of a prompt's chunk; an index that fails costs the better encoding, not the answer."""
        if text is None:
            return ()
        try:
            return self.companions.of(text, namespace)
        except Exception as error:
            log.warning("the neighbours of a chunk could not be looked up", exc_info=True)
            notes.append(f"a chunk's neighbours could not be looked up ({error!r}): taken to have none")
            return ()
