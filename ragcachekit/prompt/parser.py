"""From a user's prompt to tokenised segments: text, chunks, and the question."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, chain, pairwise
from typing import Any

from ragcachekit.prompt.messages import segment_messages
from ragcachekit.prompt.registry import ChunkRegistry
from ragcachekit.prompt.segments import (
    Segmentation,
    TokenSegment,
    blanks_outside,
    body,
    is_read_apart,
    segment_text,
)
from ragcachekit.prompt.special_tokens import SpecialTokenTexts, plain_count, plain_note
from ragcachekit.prompt.token_runs import Run, find_runs
from ragcachekit.prompt.tokenizer import PromptTokenizer, common_prefix, without_lone_surrogates
from ragcachekit.types import Chunk, Ids, Prompt, Segment, Text

PromptLike = str | Prompt | Sequence[Mapping[str, Any]]
"""A prompt: a string, chat messages, or explicit segments."""

Tools = Sequence[Mapping[str, Any]]
"""JSON schemas of functions, which a chat template renders."""

_CERTAIN = "only chat messages separate them from the template's own for certain"

AS_GIVEN = "the segments of this Prompt are tokenised one by one, as given; the joined text has other ids"

BOS_TWICE = (
    "the prompt begins with BOS twice, as tokenizer(text) adds one before text that brings its own; give "
    "messages, or leave the BOS string out"
)

SLOW_SPECIAL = (
    "documents hold special-token strings, and this tokenizer gives no offsets: tokenised segment by segment"
)


NO_TEMPLATE = (
    "the prompt is plain text, so the model's chat template was not applied: give messages, "
    '[{"role": "user", "content": ...}], unless the text went through a template already'
)


@dataclass(frozen=True, eq=False)
class ParsedPrompt:
    """A tokenised prompt.

    - ``texts``: Those of its chunks, by their token ids.
    - ``notes``: For the report.
    - ``fallback``: Why it must be prefilled in full although chunks may be in it.
    - ``no_chunks``: Why no chunk was found in it; empty if one was, or if the segments were given.
    """

    segments: tuple[TokenSegment, ...]
    namespace: str
    texts: Mapping[Ids, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    fallback: str | None = None
    no_chunks: str = ""

    @property
    def token_ids(self) -> Ids:
        """The whole prompt."""
        return tuple(chain.from_iterable(segment.token_ids for segment in self.segments))

    @property
    def has_chunks(self) -> bool:
        """Whether a segment is a chunk."""
        return any(segment.is_chunk for segment in self.segments)


class PromptParser:
    """Renders and tokenises prompts, and finds the registered chunks in them.

    ``registry`` holds the chunks, ``special_tokens`` those texts that contain special-token strings. Without
    a tokenizer, prompts are segments of token ids.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokens = PromptTokenizer(tokenizer) if tokenizer is not None else None
        self.registry = ChunkRegistry()
        self.special_tokens = SpecialTokenTexts(self._tokens.special_tokens if self._tokens else ())

    @property
    def tokens(self) -> PromptTokenizer:
        """The tokenizer; ValueError if there is none."""
        if self._tokens is None:
            raise ValueError("this RagCache has no tokenizer; give token ids, or a tokenizer when making it")
        return self._tokens

    @property
    def has_chat_template(self) -> bool:
        """Whether the tokenizer has a chat template."""
        return self._tokens is not None and bool(self._tokens.tokenizer.chat_template)

    def lacks_template(self, prompt: PromptLike) -> bool:
        """Whether the prompt is a string without the chat template that the model has."""
        if not isinstance(prompt, str) or not self.has_chat_template:
            return False
        return not any(token in prompt for token in self.tokens.special_tokens)

    @property
    def pad(self) -> int:
        """Token id for padding."""
        return self._tokens.pad if self._tokens else 0

    @property
    def blank_line(self) -> Ids:
        """Token ids of the blank line between two chunks; empty without a tokenizer."""
        return self._tokens.blank_line() if self._tokens else ()

    def decode(self, ids: Sequence[int]) -> str:
        """Text of generated ids; empty without a tokenizer."""
        return self._tokens.decode(ids) if self._tokens else ""

    def bos(self, model: Any) -> int | None:
        """The id before every prompt, if there is one."""
        found: int | None = self._tokens.bos if self._tokens else model.config.get_text_config().bos_token_id
        return found

    def chunk_ids(self, text: str) -> Ids:
        """Token ids of a chunk, without the blanks at its end, which chains strip or keep."""
        return self.tokens.chunk(body(text))

    def system_ids(self, system: str) -> Ids:
        """Token ids of a system text before a prompt's first chunk; with BOS, unless it begins with one."""
        ids, bos = self.tokens.before_chunk(system, special=False), self.tokens.leading
        return ids if ids[: len(bos)] == bos else bos + ids

    def register(self, namespace: str, texts: Sequence[str]) -> int:
        """Search the namespace's prompts for these texts; returns how many are long enough."""
        self.special_tokens.add(namespace, texts)
        return self.registry.add(namespace, texts)

    def forget(self, namespace: str, texts: Sequence[str] | None) -> None:
        """Unregister texts; with None, all of the namespace."""
        if texts is None:
            self.registry.clear(namespace)
            self.special_tokens.clear(namespace)
        else:
            self.registry.discard(namespace, texts)
            self.special_tokens.discard(namespace, texts)

    def parse(self, prompt: PromptLike, namespace: str, tools: Tools | None = None) -> ParsedPrompt:
        """Render, segment and tokenise one prompt.

        A string has the ids of ``tokenizer(text)``, messages those of ``apply_chat_template``; chunks are
        runs of them. Explicit segments are tokenised one by one. Raises ValueError or TypeError for an empty
        prompt, one of another type, or ``tools`` that are not rendered.
        """
        segmentation = self.segment(prompt, namespace, tools)
        texts: dict[Ids, str] = {}
        segments, notes = self._tokenise(prompt, segmentation, texts)
        if not any(segment.token_ids for segment in segments):
            raise ValueError("the prompt is empty")
        found = isinstance(prompt, Prompt) or any(segment.is_chunk for segment in segments)
        return ParsedPrompt(
            tuple(segments),
            namespace,
            texts,
            (*segmentation.notes, *notes),
            segmentation.fallback,
            "" if found else self.registry.nothing_found(namespace),
        )

    def segment(self, prompt: PromptLike, namespace: str, tools: Tools | None = None) -> Segmentation:
        """The prompt's segments: as given, or by the registered chunks in it."""
        if tools:
            self._check_tools(prompt)
        if isinstance(prompt, Prompt):
            return self._split(Segmentation(prompt.segments), namespace)
        if isinstance(prompt, str):
            return self._split(segment_text(prompt, self.registry, namespace), namespace)
        if isinstance(prompt, Sequence) and not isinstance(prompt, str):
            render = partial(self.tokens.render, tools=tools)
            return segment_messages(prompt, render, self.registry, namespace, self.special_tokens)
        raise TypeError(f"a prompt is a str, a list of messages or a Prompt, not {type(prompt).__name__}")

    def _check_tools(self, prompt: PromptLike) -> None:
        if isinstance(prompt, str | Prompt):
            raise ValueError("tools= needs chat messages: another prompt does not go through a chat template")
        if not self.tokens.renders_tools:
            raise ValueError(
                "the model's chat template does not render tools; describe them in a message, or take a "
                "model whose template does"
            )

    def _split(self, segmentation: Segmentation, namespace: str) -> Segmentation:
        segments = self.special_tokens.split(namespace, segmentation.segments)
        count = plain_count(segments) - plain_count(segmentation.segments)
        notes = (f"{plain_note(count)}; {_CERTAIN}",) if count else ()
        return replace(segmentation, segments=tuple(segments), notes=(*segmentation.notes, *notes))

    def _tokenise(
        self, prompt: PromptLike, found: Segmentation, texts: dict[Ids, str]
    ) -> tuple[list[TokenSegment], tuple[str, ...]]:
        """Token ids per segment of the segmented ``prompt``, and notes; fills ``texts``."""
        if isinstance(prompt, Prompt):
            given = self._as_given(found.segments, True, texts)
            return given, (AS_GIVEN,) if self._differs(found.segments, given) else ()
        special = isinstance(prompt, str)
        segments = [_clean(segment) for segment in blanks_outside(found.segments)]
        ends = list(accumulate((len(s.text or "") for s in segments), initial=0))
        spans = list(zip(segments, pairwise(ends), strict=True))
        text = "".join(s.text or "" for s in segments)
        apart = [span for segment, span in spans if is_read_apart(segment)]
        tokens = self.tokens.prompt(text, special=special, apart=apart) if text else None
        if tokens is None:
            return self._as_given(found.segments, special, texts), (SLOW_SPECIAL,) if text else ()
        chunks = [(s.text or "", span) for s, span in spans if isinstance(s, Chunk)]
        own = [self.chunk_ids(chunk) for chunk, _ in chunks]
        runs = find_runs(tokens.ids, tokens.offsets, [span for _, span in chunks], own)
        for (chunk, _), ids, run in zip(chunks, own, runs, strict=True):
            if run is not None:
                texts[ids] = texts[tokens.ids[run.start : run.stop]] = chunk
        system, first = Ids(), next((span[0] for (_, span), run in zip(chunks, runs, strict=True) if run), 0)
        if first:
            system = self.tokens.before_chunk(text[:first], special=special)
        lost, plain = runs.count(None), tokens.plain - plain_count(segments)
        notes = [*([_lost(lost)] if lost else []), *([_plain(plain)] if plain > 0 else [])]
        if special and self.tokens.bos is not None and tokens.ids[:2] == (self.tokens.bos,) * 2:
            notes.append(BOS_TWICE)
        return _cut(tokens.ids, system, zip(runs, own, strict=True)), tuple(notes)

    def _differs(self, segments: Sequence[Segment], given: Sequence[TokenSegment]) -> bool:
        """Whether the tokenizer makes other ids of the joined text than of its segments."""
        texts = [segment.text for segment in segments if segment.text is not None]
        if not 1 < len(texts) == len(segments):
            return False
        whole = self.tokens.prompt(without_lone_surrogates("".join(texts)), special=True)
        return whole is not None and whole.ids != tuple(chain.from_iterable(s.token_ids for s in given))

    def _as_given(self, given: Sequence[Segment], leading: bool, texts: dict[Ids, str]) -> list[TokenSegment]:
        """Segments tokenised one by one; ``leading``: after BOS, if the tokenizer puts one before text."""
        segments: list[TokenSegment] = []
        for segment in blanks_outside(given):
            ids = self._ids(segment, first=not segments)
            if not ids:
                continue
            is_chunk = isinstance(segment, Chunk)
            pieces = self._chunk_as_given(segment, ids, texts) if is_chunk else [TokenSegment(ids, False)]
            if segments and not pieces[0].is_chunk and not segments[-1].is_chunk:
                # One text: the prefix, and what a chunk is encoded after, go up to the first chunk.
                pieces[0] = TokenSegment(segments.pop().token_ids + ids, False)
            segments += pieces
        if not leading or not segments or given[0].token_ids is not None:
            return segments
        bos = self.tokens.leading
        if segments[0].token_ids[: len(bos)] == bos:
            return segments
        if segments[0].is_chunk:
            return [TokenSegment(bos, False), *segments]
        return [TokenSegment(bos + segments[0].token_ids, False), *segments[1:]]

    def _chunk_as_given(self, chunk: Segment, ids: Ids, texts: dict[Ids, str]) -> list[TokenSegment]:
        """A chunk, and last tokens of it that would be others before a blank line."""
        if chunk.text is None:
            return [TokenSegment(ids, True)]
        own = self.chunk_ids(chunk.text)
        texts[own] = chunk.text
        rest = [TokenSegment(ids[len(own) :], False)] if len(ids) > len(own) else []
        return [TokenSegment(own, True), *rest]

    def _ids(self, segment: Segment, first: bool) -> Ids:
        if segment.token_ids is not None:
            return segment.token_ids
        text = segment.text or ""
        if isinstance(segment, Chunk):
            return self.tokens.plain(body(text))
        if isinstance(segment, Text) and segment.split_special_tokens:
            return self.tokens.plain(text)
        return self.tokens.text(text, first=first)


def _cut(ids: Ids, system: Ids, chunks: Iterable[tuple[Run | None, Ids]]) -> list[TokenSegment]:
    """The prompt's tokens as texts and chunks, each with its own tokens.

    Of the text before the first chunk, ``system``, as far as the prompt begins with it, is a segment apart:
    the tokens after it depend on the chunk.
    """
    segments, done = list[TokenSegment](), 0
    for run, own in chunks:
        if run is None:
            continue
        if not segments and (same := len(common_prefix(system, ids[: run.start]))):
            segments.append(TokenSegment(ids[:same], False))
            done = same
        if done < run.start:
            segments.append(TokenSegment(ids[done : run.start], False))
        found = ids[run.start : run.stop]
        part = (own, run.first) if found != own else ((), 0)
        segments.append(TokenSegment(found, True, *part))
        done = run.stop
    if done < len(ids):
        segments.append(TokenSegment(ids[done:], False))
    return segments


def _clean(segment: Segment) -> Segment:
    """A chunk without the blanks at its end; no lone surrogates, which tokenizers refuse."""
    text = segment.text or ""
    return replace(segment, text=without_lone_surrogates(body(text) if isinstance(segment, Chunk) else text))


def _lost(count: int) -> str:
    chunks = "chunk is" if count == 1 else "chunks are"
    return f"{count} {chunks} computed: their tokens in this prompt are not those of the text alone"


def _plain(count: int) -> str:
    strings = f"{count} special-token string{'s' * (count > 1)}"
    return f"{strings} in chunks read as plain text: there the ids are not those of the tokenizer's own call"
