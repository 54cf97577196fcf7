"""From what the user gave as a prompt to a plan: segment, tokenise, look up, choose."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from ragcachekit.errors import PromptTooLong
from ragcachekit.link.base import SelectionPolicy
from ragcachekit.link.beginning import BeginningReader
from ragcachekit.link.encodings import IN_PROMPT, Encodings
from ragcachekit.link.lookup import Fetch
from ragcachekit.link.neighbours import Neighbours, TokenNeighbours
from ragcachekit.link.plan import make_plan
from ragcachekit.link.planned import LinkPlan, Missing
from ragcachekit.link.request import PromptRequest
from ragcachekit.link.segments import TokenSegment
from ragcachekit.link.upcoming import Upcoming, is_chunk_id, upcoming_keys
from ragcachekit.link.variants import VariantPool
from ragcachekit.model.encoding import Ids
from ragcachekit.model.fingerprint import ModelWatch
from ragcachekit.model.kv import ChunkKV
from ragcachekit.model.rope import Rope
from ragcachekit.model.tokens import SegmentTokenizer
from ragcachekit.prompt.altered import Retrieved
from ragcachekit.prompt.base import Segmentation
from ragcachekit.prompt.messages import segment_messages
from ragcachekit.prompt.registry import ChunkRegistry, Registered
from ragcachekit.prompt.segment import blanks_outside, body, segment_text
from ragcachekit.prompt.special_tokens import SpecialTokenTexts, plain_count, plain_note
from ragcachekit.store.base import KVStore
from ragcachekit.types import Chunk, KVKey, Prompt, Segment, Text

log = logging.getLogger(__name__)

PromptLike = str | Prompt | Sequence[Mapping[str, Any]]
"""A prompt: a string, chat messages, or explicit segments."""

MODEL_CHANGED = (
    "the model changed since this RagCache was made (weights, adapter, dtype or attention "
    "implementation); make a new RagCache around it"
)

_CERTAIN = "chat messages tell them from the template's own for certain"


class Preparer:
    """Joins the prompt room with the link room for one model and one store.

    Parameters
    ----------
    model, tokenizer
        As :class:`ragcachekit.RagCache` takes them.
    rope : Rope
    store : KVStore
    fingerprint : str
    encoder : str or None
        The encoder asked for; None for what the policy wants.
    neighbours : mapping, optional
        Namespace to where its chunks' neighbours come from, for the encoder ``similar:n``.
    fetch : callable, optional
        Gives what finds one prompt's entries; by default they are read from ``store`` as they are found.
    tree : BeginningReader, optional
        Knows the exact beginnings of past prompts.
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
        tree: BeginningReader | None = None,
    ) -> None:
        self.registry = ChunkRegistry()
        self.retrieved = Retrieved()
        self.context = rope.context
        self._tokens = SegmentTokenizer(tokenizer) if tokenizer is not None else None
        self.special_tokens = SpecialTokenTexts(self._tokens.special_tokens if self._tokens else ())
        self._rope = rope
        self._fetch = fetch or (lambda: Fetch(store))
        self._tree = tree
        self._upcoming = Upcoming()
        self._fingerprint = fingerprint
        self._encoder = encoder
        self.variants = VariantPool()
        self.neighbours = TokenNeighbours(neighbours or {}, self.chunk_ids)
        self._bos = self._tokens.bos if self._tokens else model.config.get_text_config().bos_token_id
        self._watch = ModelWatch(model)
        self._identity = self._watch.state()

    @property
    def tokens(self) -> SegmentTokenizer:
        """The tokenizer, or a ValueError that says what to do."""
        if self._tokens is None:
            raise ValueError("this RagCache has no tokenizer; give token ids, or a tokenizer when making it")
        return self._tokens

    @property
    def pad(self) -> int:
        """An id for padding."""
        return self._tokens.pad if self._tokens else 0

    def decode(self, ids: Sequence[int]) -> str:
        """Text of generated ids; empty without a tokenizer."""
        return self._tokens.decode(ids) if self._tokens else ""

    def unchanged(self) -> bool:
        """Whether the model still is the one whose fingerprint was taken."""
        return self._watch.state() == self._identity

    def encodings(
        self, policy: SelectionPolicy, near: Callable[[Ids], Sequence[Ids]] = lambda _: ()
    ) -> Encodings:
        """The encodings that ``policy`` works on; ``near`` gives a chunk's neighbours as token ids."""
        if policy.encoder and self._encoder not in (None, policy.encoder):
            raise ValueError(
                f"policy {policy.name} is defined over encoder {policy.encoder}, not {self._encoder}"
            )
        encodings = Encodings(policy.encoder or self._encoder or "standalone", self._rope, self._bos, near)
        if encodings.similar and not self.neighbours:
            raise ValueError(
                f"the encoder {encodings.name} needs neighbours=, such as SimilarChunks(texts, embeddings)"
            )
        return encodings

    def register(self, space: str, texts: Sequence[str]) -> Registered:
        """Search the namespace's prompts for these texts."""
        self.special_tokens.add(space, texts)
        return self.registry.add(space, texts)

    def note_retrieved(self, space: str, texts: Sequence[str]) -> None:
        """These texts were retrieved for a prompt that will come."""
        self.special_tokens.add(space, texts)
        self.retrieved.saw(space, texts)

    def note_stored(self, key: KVKey, kv: ChunkKV) -> None:
        """An entry is in the store now."""
        if key.encoding.partition("@")[0] == IN_PROMPT:
            self.variants.add(key, kv)

    def request(
        self, prompt: PromptLike, space: str, policy: SelectionPolicy, epoch: int = 0
    ) -> PromptRequest:
        """Segment and tokenise one prompt, and find its chunks' keys; ``epoch`` is that of the forgets.

        Raises
        ------
        ValueError, TypeError
            For an empty prompt or one of another type.
        PromptTooLong
        """
        segmentation = self._segment(prompt, space)
        texts: dict[Ids, str] = {}
        notes: list[str] = []
        # Chat templates write their own BOS; a string or segments of text get the tokenizer's.
        segments = self._tokenise(segmentation.prompt, isinstance(prompt, str | Prompt), texts)
        count = sum(len(segment.token_ids) for segment in segments)
        if count == 0:
            raise ValueError("the prompt is empty")
        if count >= self.context:
            raise PromptTooLong(
                f"the prompt has {count} tokens, the model's context is {self.context}; "
                "retrieve fewer or shorter chunks"
            )
        self._upcoming.saw(space, segments)
        encodings = self.encodings(policy, lambda ids: self._near(texts.get(ids), space, notes))
        fallback = segmentation.fallback if self.unchanged() else MODEL_CHANGED
        if fallback is not None:
            request = PromptRequest(tuple(segments), policy, encodings.name, space, fallback=fallback)
        elif not policy.reads_cache:
            request = PromptRequest(tuple(segments), policy, encodings.name, space)
        else:
            request = PromptRequest.of(
                segments, policy, encodings, self._fetch(), self._fingerprint, space, self._tree
            )
            notes += self._not_found(prompt, segmentation.prompt, space)
        return replace(request, notes=(*segmentation.prompt.notes, *notes), epoch=epoch)

    def plan(self, request: PromptRequest, without: frozenset[KVKey] = frozenset()) -> LinkPlan:
        """The complete plan of a request; ``without`` are entries that turned out not to come."""
        return make_plan(request, self.variants, without)

    def _not_found(self, given: PromptLike, prompt: Prompt, space: str) -> tuple[str, ...]:
        """Which retrieved chunks were not found, or why the prompt has none at all."""
        altered = self.retrieved.altered(space, prompt)
        has_chunks = any(isinstance(segment, Chunk) for segment in prompt.segments)
        if altered or has_chunks or isinstance(given, Prompt):
            return altered
        return (self.registry.nothing_found(space),)

    def upcoming(
        self, chunks: Sequence[str], space: str, policy: SelectionPolicy, system: str | None
    ) -> list[KVKey]:
        """Keys that a prompt of these chunks, texts or ids, would look up.

        What stands before them is ``system``, or the last system text that was seen in the namespace.
        """
        before = self._upcoming.last(space)
        if system is not None:
            before = self._behind_text(system)
        known: dict[Ids, str] = {}
        items: list[Ids | str] = []
        for chunk in chunks:
            items.append(chunk if is_chunk_id(chunk) else self.chunk_ids(chunk))
            if not isinstance(items[-1], str):
                known[items[-1]] = chunk
        encodings = self.encodings(policy, lambda ids: self._near(known.get(ids), space, []))
        return upcoming_keys(items, encodings, before, self._fingerprint, space, self.variants)

    def forget(self, space: str, ids: frozenset[str] | None, texts: Sequence[str]) -> None:
        """Forget chunks and their texts; with None all of the namespace, and what its prompts were."""
        self.neighbours.forget(space, ids)
        self.retrieved.forget(space)
        if ids is not None:
            self.registry.discard(space, texts)
            self.special_tokens.discard(space, texts)
            return
        self.registry.clear(space)
        self.special_tokens.clear(space)
        self._upcoming.forget(space)

    def missing(
        self, texts: Sequence[str], space: str, policy: SelectionPolicy, system: str | None, epoch: int = 0
    ) -> list[Missing]:
        """What to encode for each text, stored already or not; the work on it began at ``epoch``.

        Raises
        ------
        ValueError
            For an empty chunk, one longer than the model's context, or a ``system`` that is needed
            and not there.
        """
        chunks = [self.chunk_ids(text) for text in texts]
        known = dict(zip(chunks, texts, strict=True))
        encodings = self.encodings(
            policy, lambda ids: self.neighbours.of(known[ids], space) if ids in known else ()
        )
        behind = self._behind(encodings, system)
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
            key = encodings.key(ids, encoding, context, self._fingerprint, space, width)
            out.append(Missing(key, ids, encoding, epoch))
        return out

    def _behind(self, encodings: Encodings, system: str | None) -> Ids:
        """The system text's ids, where chunks are encoded behind it."""
        if not encodings.behind_system:
            return ()
        if system is None:
            raise ValueError(
                f"the encoder {encodings.name!r} needs system=, the text before the prompt's first chunk"
            )
        return self._behind_text(system)

    def _behind_text(self, system: str) -> Ids:
        if not system:  # then all that stands before a first chunk is what the tokenizer puts there
            return self.tokens.leading
        return self._tokenise(Prompt([Text(system)]), leading=True)[0].token_ids

    def _near(self, text: str | None, space: str, notes: list[str]) -> Sequence[Ids]:
        """Neighbours of a prompt's chunk. An index that fails costs the better encoding, not the answer."""
        if text is None:
            return ()
        try:
            return self.neighbours.of(text, space)
        except Exception as error:
            log.warning("the neighbours of a chunk could not be looked up", exc_info=True)
            notes.append(f"a chunk's neighbours could not be looked up ({error!r}): taken to have none")
            return ()

    def _segment(self, prompt: PromptLike, space: str) -> Segmentation:
        special = self.special_tokens
        if isinstance(prompt, Prompt):
            return _split(Segmentation(prompt), special, space)
        if isinstance(prompt, str):
            return _split(segment_text(prompt, self.registry, space), special, space)
        if isinstance(prompt, Sequence):
            messages = cast(Sequence[Mapping[str, Any]], prompt)
            return segment_messages(messages, self.tokens.render, self.registry, space, special)
        raise TypeError(f"a prompt is a str, a list of messages or a Prompt, not {type(prompt).__name__}")

    def _tokenise(
        self, prompt: Prompt, leading: bool, texts: dict[Ids, str] | None = None
    ) -> list[TokenSegment]:
        """Ids per segment; ``leading``: behind what the tokenizer puts in front of plain text (BOS).

        ``texts`` is filled with the chunks' texts by their ids.
        """
        segments: list[TokenSegment] = []
        for segment in blanks_outside(prompt.segments):
            ids = self._ids(segment, first=not segments)
            is_chunk = isinstance(segment, Chunk)
            if texts is not None and is_chunk and segment.text is not None:
                texts[ids] = segment.text
            if ids and segments and not is_chunk and not segments[-1].is_chunk:
                # One text: the prefix, and what a chunk is encoded behind, go up to the first chunk.
                segments[-1] = TokenSegment(segments[-1].token_ids + ids, False)
            elif ids:
                segments.append(TokenSegment(ids, is_chunk))
        if not leading or not segments or prompt.segments[0].token_ids is not None:
            return segments
        bos = self.tokens.leading
        if segments[0].token_ids[: len(bos)] == bos:
            return segments
        if segments[0].is_chunk:
            return [TokenSegment(bos, False), *segments]
        return [TokenSegment(bos + segments[0].token_ids, False), *segments[1:]]

    def _ids(self, segment: Segment, first: bool) -> tuple[int, ...]:
        if segment.token_ids is not None:
            return segment.token_ids
        text = segment.text or ""
        if isinstance(segment, Chunk):
            return self.chunk_ids(text)
        if isinstance(segment, Text) and segment.split_special_tokens:
            return self.tokens.chunk(text)
        return self.tokens.text(text, first=first)

    def chunk_ids(self, text: str) -> Ids:
        """A chunk's ids without the blanks at its end, which chains strip or keep: one entry serves both."""
        return self.tokens.chunk(body(text))


def _split(segmentation: Segmentation, special: SpecialTokenTexts, space: str) -> Segmentation:
    """The segmentation with what may come from retrieved texts read as plain text, and a note of it."""
    prompt = segmentation.prompt
    segments = special.split(space, prompt.segments)
    count = plain_count(segments) - plain_count(prompt.segments)
    notes = (f"{plain_note(count)}; {_CERTAIN}",) if count else ()
    return replace(segmentation, prompt=Prompt(segments, (*prompt.notes, *notes)))
