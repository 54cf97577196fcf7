"""What is known of chunks before a prompt is planned: encodings, keys, neighbours, registered texts."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ragcachekit.encode.neighbours import Neighbours, TokenNeighbours
from ragcachekit.engine.prompt_segmenter import PromptSegmenter
from ragcachekit.model.encoding import Ids
from ragcachekit.model.identity.watch import ModelWatch
from ragcachekit.model.kv import SENSITIVITY, ChunkKV
from ragcachekit.model.rope.rotation import Rope
from ragcachekit.plan.encodings import IN_PROMPT, Encodings
from ragcachekit.plan.link_plan import Missing
from ragcachekit.plan.prefetch_keys import LastPrompts, is_chunk_id, prefetch_keys
from ragcachekit.plan.variants import open_pool
from ragcachekit.policies.base import SelectionPolicy
from ragcachekit.store.base import KVStore
from ragcachekit.store.forgets import ForgottenTexts
from ragcachekit.types import KVKey

log = logging.getLogger(__name__)


class ChunkPlanner(PromptSegmenter):
    """Names what to encode and to look up for the chunks of one model in one store.

    ``encoder`` None stands for the policy's own. ``neighbours`` maps namespaces to the source of neighbours
    for the encoder ``similar:n``. ``same_source``: a chunk is encoded behind chunks of its own source alone.
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
    ) -> None:
        super().__init__(tokenizer)
        self.context = rope.context
        self._rope, self._store = rope, store
        self.last_prompts = LastPrompts()
        self._fingerprint = fingerprint
        self._encoder = encoder
        self.variants = open_pool(store)
        self.neighbours = TokenNeighbours(neighbours or {}, self.chunk_ids, same_source)
        if self.neighbours.chunk_sources is not None:
            self.variants.averages.allow = self.neighbours.chunk_sources.allow
        self._bos = self.bos(model)
        self._joint = self._tokens.blank_line() if self._tokens else ()
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
        if name == IN_PROMPT and self.neighbours.chunk_sources is not None:
            raise ValueError(
                "the encoder 'in-prompt' keeps chunks behind whatever stood before them, which "
                "companions='same-source' rules out; use 'average:3' or 'system' with it"
            )
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

    def forget(
        self,
        namespace: str,
        ids: frozenset[str] | None,
        texts: Sequence[str],
        within: ForgottenTexts | None = None,
    ) -> None:
        """Forget chunks and their texts; with None all of the namespace, including its last prompt.

        The last prompt is forgotten, too, where it holds a text that ``within`` finds.
        """
        self.neighbours.forget(namespace, ids, texts)
        if within is not None and within.within(self.last_prompts.last(namespace) or ()):
            self.last_prompts.forget(namespace)
        if ids is not None:
            self.registry.discard(namespace, texts)
            self.special_tokens.discard(namespace, texts)
            return
        self.registry.clear(namespace)
        self.special_tokens.clear(namespace)
        self.last_prompts.forget(namespace)

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
