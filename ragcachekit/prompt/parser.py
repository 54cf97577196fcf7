"""From a user's prompt to tokenised segments: rendered, tokenised as a whole, and cut at the chunks in it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ragcachekit.prompt.segments import (
    ChunkRegistry,
    Segmentation,
    TokenSegment,
    blanks_outside,
    body,
    marked_blocks,
    segment_messages,
    segment_text,
)
from ragcachekit.prompt.tokenizer import (
    PromptTokenizer,
    Span,
    SpecialTokenTexts,
    common_length,
    common_prefix,
    is_read_apart,
    plain_count,
    without_lone_surrogates,
)
from ragcachekit.types import Chunk, Ids, Prompt, Segment

PromptLike = str | Prompt | Sequence[Mapping[str, Any]]
"""A prompt: a string, chat messages, or explicit segments."""

Tools = Sequence[Mapping[str, Any]]
"""JSON schemas of functions, which a chat template renders."""

BOS_TWICE = (
    "the prompt begins with BOS twice, as tokenizer(text) adds one before text that brings its own; give "
    "messages, or leave the BOS string out"
)
SLOW_SPECIAL = (
    "documents hold special-token strings, and this tokenizer gives no offsets: tokenised segment by segment"
)
LOST = "computed chunks: {}, as their tokens in this prompt are not those of the text alone"
PLAIN = "special-token strings in chunks read as plain text: {}; there the ids are not the tokenizer's own"
NO_TEMPLATE = (
    "the prompt is plain text, so the model's chat template was not applied: give messages, "
    '[{"role": "user", "content": ...}], unless the text went through a template already'
)

QUESTION = "\n\nWhat does the text say? Which names, numbers and facts are in it?\n"
"""Asked of chunks that are encoded ahead, for what questions look at."""
MAX_SHIFT = 8  # tokens by which a boundary may shift the rest of a chunk: "\\n\\n" + "The" or " The", ...
ANCHOR = 8  # tokens of a chunk's middle that are searched for where the tokenizer gives no offsets


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
        return tuple(chain.from_iterable(segment.token_ids for segment in self.segments))

    @property
    def has_chunks(self) -> bool:
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

    def lacks_template(self, prompt: PromptLike) -> bool:
        """Whether the prompt is a string without the chat template that the model has."""
        if not isinstance(prompt, str) or self._tokens is None or not self._tokens.tokenizer.chat_template:
            return False
        return not any(token in prompt for token in self._tokens.special_tokens)

    @property
    def pad(self) -> int:
        return self._tokens.pad if self._tokens else 0

    @property
    def blank_line(self) -> Ids:
        """Token ids of the blank line between two chunks; empty without a tokenizer."""
        return self._tokens.blank_line() if self._tokens else ()

    @property
    def question(self) -> Ids:
        """Token ids of :data:`QUESTION`; empty without a tokenizer."""
        return self.chunk_ids(QUESTION) if self._tokens else ()

    def decode(self, ids: Sequence[int]) -> str:
        """Text of generated ids; empty without a tokenizer."""
        return self._tokens.decode(ids) if self._tokens else ""

    def bos(self, model: Any) -> int | None:
        """The id before every prompt, if there is one."""
        return (
            self._tokens.bos
            if self._tokens
            else getattr(model.config.get_text_config(), "bos_token_id", None)
        )

    def chunk_ids(self, text: str) -> Ids:
        """Token ids of a chunk, without the blanks at its end, which chains strip or keep."""
        return self.tokens.chunk(body(text))

    def system_ids(self, system: str) -> Ids:
        """Token ids of a system text before a prompt's first chunk; with BOS, unless it begins with one."""
        ids, bos = self.tokens.before_chunk(system, special=False), self.tokens.leading
        return ids if ids[: len(bos)] == bos else bos + ids

    def register(self, namespace: str, texts: Sequence[str], ids: Mapping[str, str] | None = None) -> int:
        """Search the namespace's prompts for these texts; returns how many are long enough.

        Of texts with ``ids``, prompts may have these instead.
        """
        self.special_tokens.add(namespace, texts)
        named = None if ids is None else {ids[text]: text for text in texts}
        return self.registry.add(namespace, texts, named)

    def forget(self, namespace: str, texts: Sequence[str] | None) -> None:
        """Unregister texts; with None, all of the namespace."""
        self.registry.forget(namespace, texts)
        self.special_tokens.forget(namespace, texts)
        if self._tokens is not None:
            self._tokens.chunk.cache_clear()

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

    def marked_rows(self, prompt: PromptLike, parsed: ParsedPrompt) -> int:
        """Rows of a parsed prompt up to the end of its last marked chunk; 0 without one."""
        every, marked = isinstance(prompt, Prompt), set[str]()
        if not isinstance(prompt, Prompt | str):
            for block in marked_blocks(prompt):
                text = block.get("text") or self.registry.text(parsed.namespace, block.get("id", ""))
                marked.add(text.strip())
        at = stop = 0
        for segment in parsed.segments:
            at += len(segment.token_ids)
            text = parsed.texts.get(segment.own or segment.token_ids, "")
            if segment.is_chunk and (every or text.strip() in marked):
                stop = at
        return stop

    def segment(self, prompt: PromptLike, namespace: str, tools: Tools | None = None) -> Segmentation:
        """The prompt's segments: as given, or by the registered chunks in it."""
        if tools:
            self._check_tools(prompt)
        if isinstance(prompt, Prompt):
            text, named = self.registry.text, [getattr(one, "id", None) for one in prompt.segments]
            given = (
                Chunk(text(namespace, name), retain=getattr(one, "retain", None)) if name else one
                for name, one in zip(named, prompt.segments, strict=True)
            )
            return self._split(Segmentation(tuple(given)), namespace)
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
        before = plain_count(segmentation.segments)
        return replace(segmentation, segments=tuple(segments)).noting_plain(
            before, "; only chat messages separate them from the template's own for certain"
        )

    def _tokenise(
        self, prompt: PromptLike, found: Segmentation, texts: dict[Ids, str]
    ) -> tuple[list[TokenSegment], tuple[str, ...]]:
        """Token ids per segment of the segmented ``prompt``, and notes; fills ``texts``."""
        if isinstance(prompt, Prompt):
            return self._as_given(found.segments, True, texts), ()
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
        bos_twice = special and self.tokens.bos is not None and tokens.ids[:2] == (self.tokens.bos,) * 2
        notes = {LOST.format(lost): lost, PLAIN.format(plain): plain > 0, BOS_TWICE: bos_twice}
        made = _cut(tokens.ids, system, zip(runs, own, strict=True))
        return made, tuple(note for note, holds in notes.items() if holds)

    def _as_given(self, given: Sequence[Segment], leading: bool, texts: dict[Ids, str]) -> list[TokenSegment]:
        """Segments tokenised one by one; ``leading``: after BOS, if the tokenizer puts one before text."""
        segments: list[TokenSegment] = []
        for segment in blanks_outside(given):
            text, ids = segment.text or "", segment.token_ids
            if ids is None and is_read_apart(segment):
                ids = self.tokens.plain(body(text) if isinstance(segment, Chunk) else text)
            elif ids is None:
                ids = self.tokens.text(text, first=not segments)
            if not ids:
                continue
            if isinstance(segment, Chunk):
                own = ids if segment.text is None else self.chunk_ids(text)
                if segment.text is not None:
                    texts[own] = text
                segments.append(TokenSegment(own, True, retain=segment.retain or 0.0))
                ids = ids[len(own) :]  # last tokens that would be others before a blank line
            elif segments and not segments[-1].is_chunk:
                # One text: the prefix, and what a chunk is encoded after, go up to the first chunk.
                ids = segments.pop().token_ids + ids
            segments += [TokenSegment(ids, False)] if ids else []
        if not leading or not segments or given[0].token_ids is not None:
            return segments
        bos, first = self.tokens.leading, segments[0]
        if first.token_ids[: len(bos)] == bos:
            return segments
        if first.is_chunk:
            return [TokenSegment(bos, False), *segments]
        return [TokenSegment(bos + first.token_ids, False), *segments[1:]]


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


# -- token runs of chunks -------------------------------------------------------------------------------


class Run(NamedTuple):
    """Prompt tokens ``start`` to ``stop`` equal the chunk's own tokens from number ``first`` on."""

    start: int
    stop: int
    first: int


def find_runs(
    ids: Ids, offsets: Sequence[Span] | None, spans: Sequence[Span], own: Sequence[Ids]
) -> list[Run | None]:
    """For each chunk, the longest run of prompt tokens that equals tokens of its own, in order.

    A token that spans a chunk's boundary (``".\\n\\n"``, a leading space) is in no run. None where less than
    half of a chunk's tokens are found: they are computed. ``ids`` are the whole prompt's, ``offsets`` the
    characters of each token (None from slow tokenizers: the chunk's middle is searched for), ``spans`` those
    of each chunk, ascending and apart, and ``own`` each chunk's own tokens.
    """
    runs: list[Run | None] = []
    # Special tokens that the tokenizer adds have (0, 0), also at the end: offsets must not go back.
    edges = np.maximum.accumulate(np.asarray(offsets or [], np.int64).reshape(-1, 2), axis=0)
    end = 0
    for span, chunk in zip(spans, own, strict=True):
        if offsets is None:
            at, stop = _around_middle(ids, chunk, end)
        else:  # tokens with a character in the chunk
            at = int(np.searchsorted(edges[:, 1], span[0], "right"))
            stop = int(np.searchsorted(edges[:, 0], span[1], "left"))
        at = max(at, end)
        found = _longest_equal(ids[at:stop], chunk) if at < stop and chunk else None
        if found is None or 2 * (found.stop - found.start) < len(chunk):
            runs.append(None)
            continue
        end = at + found.stop
        runs.append(Run(at + found.start, end, found.first))
    return runs


def _around_middle(ids: Ids, chunk: Ids, after: int) -> Span:
    """Find a chunk by the tokens of its middle: of several places, the one that equals most of it."""
    middle = max(0, (len(chunk) - ANCHOR) // 2)
    anchor = chunk[middle : middle + ANCHOR]
    found, most = (after, after), 0
    for at in range(after, len(ids) - len(anchor) + 1):
        if ids[at] == anchor[0] and ids[at : at + len(anchor)] == anchor:
            equal = common_length(ids[at:], chunk[middle:])
            equal += common_length(ids[after:at][::-1], chunk[:middle][::-1])
            if equal > most:
                found = (max(after, at - middle - MAX_SHIFT), at - middle + len(chunk) + MAX_SHIFT)
                most = equal
            if equal == len(chunk):
                break
    return found


def _longest_equal(found: Ids, own: Ids) -> Run | None:
    """The longest run of ``found`` that equals a run of ``own``, shifted by at most :data:`MAX_SHIFT`."""
    if found == own:
        return Run(0, len(own), 0)
    best: Run | None = None
    prompt, chunk = np.asarray(found), np.asarray(own)
    for shift in sorted(range(-MAX_SHIFT, MAX_SHIFT + 1), key=abs):
        # found[i] is compared with own[i + shift].
        low, high = max(0, -shift), min(len(prompt), len(chunk) - shift)
        if high - low <= (best.stop - best.start if best else 0):
            continue
        start, stop = _longest_true(prompt[low:high] == chunk[low + shift : high + shift])
        if stop - start > (best.stop - best.start if best else 0):
            best = Run(low + start, low + stop, low + start + shift)
    return best


def _longest_true(equal: npt.NDArray[np.bool_]) -> Span:
    """The longest stretch of True."""
    breaks = np.flatnonzero(~equal)
    starts = np.concatenate(([0], breaks + 1))
    stops = np.concatenate((breaks, [equal.size]))
    longest = int(np.argmax(stops - starts))
    return int(starts[longest]), int(stops[longest])
