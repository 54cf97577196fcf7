"""Segments of a prompt: a string, or rendered chat messages, cut at their chunks; token segments."""

from __future__ import annotations

import re
import threading
import unicodedata
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple
from uuid import uuid4

from ragcachekit.errors import UnknownChunk
from ragcachekit.prompt.tokenizer import Span, SpecialTokenTexts, common_length, is_read_apart, plain_count
from ragcachekit.types import Chunk, Ids, Segment, Text, chunk_id, part_id

MARK = "chunk"
"""Key of a content block: whether the block's text is a chunk."""

Message = Mapping[str, Any]
Render = Callable[[list[dict[str, Any]]], str]

# The start of a chunk's sentinel. Letters and digits alone, which no template escapes or reformats, and one
# Z: no occurrence begins in the text before it.
_SENTINEL_START = "Zq7xChunk"


@dataclass(frozen=True)
class Segmentation:
    """A prompt's segments, none empty, whose joined texts are the searched text.

    ``notes`` are for the report. ``fallback`` is why nothing was segmented although chunks may be there.
    """

    segments: tuple[Segment, ...]
    notes: tuple[str, ...] = ()
    fallback: str | None = None

    def noting_plain(self, before: int = 0, more: str = "") -> Segmentation:
        """With a note on special-token strings that are read as plain text, ``before`` of them as given."""
        if not (count := plain_count(self.segments) - before):
            return self
        strings = f"{count} special-token string{'s' * (count > 1)}"
        note = f"{strings} of retrieved text in the prompt's fixed text: read as plain text{more}"
        return replace(self, notes=(*self.notes, note))


@dataclass(frozen=True)
class TokenSegment:
    """A tokenised segment; ``is_chunk`` marks retrieved text.

    Where a prompt has only part of a chunk's own tokens (a boundary changed the others), ``own`` are all of
    them, and ``token_ids`` those from number ``first`` on.
    """

    token_ids: Ids
    is_chunk: bool
    own: Ids = ()
    first: int = 0
    retain: float = 0.0

    def name(self, namespace: str) -> str:
        """The chunk id, or the id of a part; of other text the id of its tokens."""
        if not self.own:
            return chunk_id(self.token_ids, namespace)
        return part_id(chunk_id(self.own, namespace), self.first, self.first + len(self.token_ids))


def token_count(segments: Iterable[TokenSegment]) -> int:
    """Tokens of a whole prompt."""
    return sum(len(segment.token_ids) for segment in segments)


def segment_text(text: str, registry: ChunkRegistry, namespace: str) -> Segmentation:
    """Cut ``text`` at the namespace's registered chunks: exact, in order, linear in its length.

    Of overlapping occurrences the leftmost, then the longest, is taken; none with an edge inside a word.
    """
    matches, done, segments = registry.find(namespace, text), 0, list[Segment]()
    for start, end in matches.found:
        segments += [Text(text[done:start]), Chunk(text[start:end])]
        done = end
    note = (
        f"chunks were searched for in the first {matches.searched} of {len(text)} characters: registered "
        "chunks that repeat themselves nearly match in too many places"
    )
    filled = tuple(segment for segment in (*segments, Text(text[done:])) if segment.text)
    return Segmentation(filled, () if matches.searched is None else (note,))


def merge_texts(segments: Iterable[Segment]) -> list[Segment]:
    """The segments without empty ones, neighbouring Texts joined (all must hold text, not ids).

    Texts with ``split_special_tokens`` stay apart, as chunks do.
    """
    merged: list[Segment] = []
    for apart, run in groupby((s for s in segments if s.text), key=is_read_apart):
        together = list(run)
        merged += together if apart else [Text(_joined(together))]
    return merged


def body(text: str) -> str:
    """A chunk's text without the blanks at its end, which some chains strip; of blanks alone, these."""
    return text.rstrip() or text


def blanks_outside(segments: Iterable[Segment]) -> Iterator[Segment]:
    """The segments; blanks at the end of a chunk, see :func:`body`, are added to the text after it."""
    blanks = ""
    for segment in segments:
        if blanks and not is_read_apart(segment) and segment.text is not None:
            yield Text(blanks + segment.text)
        else:
            yield from [Text(blanks)] if blanks else []
            yield segment
        text = segment.text if isinstance(segment, Chunk) else None
        blanks = text[len(body(text)) :] if text else ""
    if blanks:
        yield Text(blanks)


# -- chat messages -------------------------------------------------------------------------------------


def marked(text: str) -> dict[str, Any]:
    """A content block whose text is a chunk, registered or not."""
    return {"type": "text", "text": text, MARK: True}


def marked_blocks(messages: Sequence[Message]) -> Iterator[Mapping[str, Any]]:
    """The content blocks of messages whose text is a chunk, registered or not."""
    for message in messages:
        content = message.get("content")
        for block in () if content is None or isinstance(content, str) else content:
            if isinstance(block, Mapping) and block.get(MARK):
                yield block


def segment_messages(
    messages: Sequence[Message],
    render: Render,
    registry: ChunkRegistry,
    namespace: str,
    special: SpecialTokenTexts,
) -> Segmentation:
    """Render chat messages and cut the rendered text at the chunks in their contents.

    Every chunk, marked or registered, is replaced by a sentinel, the messages are rendered, and the chunks
    are put back. Unless that equals the rendered messages, the prompt is a plain prefill with the reason in
    ``fallback``. Special-token strings of retrieved texts become plain text in either case.

    ``render`` makes the prompt's text of messages with string contents, generation prompt included; what it
    raises for the messages themselves is passed on. ValueError or TypeError for a message without a ``role``,
    or whose ``content`` is no string, None, or list of strings and text blocks.
    """
    text_of = partial(registry.text, namespace)
    given = [_content_segments(message, text_of) for message in messages]
    rendered = render([_with_content(m, c) for m, c in zip(messages, given, strict=True)])
    contents, notes = list[list[Segment]](), list[str]()
    for number, content in enumerate(given, 1):
        contents.append([])
        for segment in content:
            found = Segmentation((segment,))
            if not isinstance(segment, Chunk):
                found = segment_text(segment.text or "", registry, namespace)
            contents[-1] += found.segments
            notes += (f"message {number}: {note}" for note in found.notes)
    split = special.split_contents(namespace, contents)
    segments, reason = _through_template(messages, split, rendered, render)
    # Templates trim: without the whitespace at a message's ends in its chunks.
    if not segments and (trimmed := list(map(_edges_outside, split))) != split:
        segments, reason = _through_template(messages, trimmed, rendered, render)
    if segments:
        return Segmentation(tuple(segments), tuple(notes)).noting_plain()
    chunks = [s.text for content in contents for s in content if isinstance(s, Chunk) and s.text]
    texts = [merge_texts([Text(_joined(content))]) for content in contents]
    split = special.split_contents(namespace, texts, chunks)
    segments, _ = _through_template(messages, split, rendered, render)
    # Where not even that comes through the template, the characters around an occurrence must decide.
    segments = segments or special.split(namespace, [Text(rendered)] if rendered else [], chunks)
    return Segmentation(tuple(segments), tuple(notes), reason if chunks else None).noting_plain()


def _joined(segments: Iterable[Segment]) -> str:
    return "".join(segment.text or "" for segment in segments)


def _content_segments(message: Message, text_of: Callable[[Any], str]) -> list[Segment]:
    if not isinstance(message, Mapping):
        raise TypeError(
            f"a message must be a mapping with 'role' and 'content', got {type(message).__name__}; "
            "convert_to_openai_messages() makes it of LangChain's; several prompts go to generate_batch"
        )
    if "role" not in message or "content" not in message:
        raise ValueError(f"a message needs 'role' and 'content', got {sorted(message)}")
    content = message["content"]
    if content is None or isinstance(content, str):
        return merge_texts([Text(content or "")])
    if not isinstance(content, Iterable):
        raise TypeError(f"content must be str or a list of text blocks, not {type(content).__name__}")
    return merge_texts(_block_segment(block, text_of) for block in content)


def _block_segment(block: object, text_of: Callable[[Any], str]) -> Segment:
    if isinstance(block, str):
        return Text(block)
    if not isinstance(block, Mapping) or block.get("type", "text") != "text":
        kind = block.get("type") if isinstance(block, Mapping) else type(block).__name__
        raise ValueError(f"only text blocks can be used in a prompt, got {kind!r}; leave other blocks out")
    text = block.get("text")
    if text is None and block.get(MARK) and "id" in block:
        text = text_of(block["id"])
    if not isinstance(text, str):
        raise TypeError(f"a text block needs a 'text' string, or 'id' and 'chunk', got {type(text).__name__}")
    # Whitespace alone is no chunk: there is nothing to reuse.
    return Chunk(text) if block.get(MARK) and text.strip() else Text(text)


def _with_content(message: Message, content: Sequence[Segment]) -> dict[str, Any]:
    if message["content"] is None:
        return dict(message)  # for templates, a missing content (tool calls) is not an empty one
    return {**message, "content": _joined(content)}


def _edges_outside(content: Sequence[Segment]) -> list[Segment]:
    segments = list(content)
    if segments and isinstance(first := segments[0], Chunk):
        text = (first.text or "").lstrip()
        segments[:1] = [Text((first.text or "")[: -len(text)]), Chunk(text)]
    if segments and isinstance(last := segments[-1], Chunk):
        text = (last.text or "").rstrip()
        segments[-1:] = [Chunk(text), Text((last.text or "")[len(text) :])]
    return merge_texts(segments)


def _through_template(
    messages: Sequence[Message], contents: Sequence[Sequence[Segment]], rendered: str, render: Render
) -> tuple[list[Segment], str]:
    """The rendered prompt's segments, or none and the reason why they cannot be had."""
    if not any(is_read_apart(s) for content in contents for s in content):
        return [Text(rendered)] if rendered else [], ""
    start, chunks, replaced = _SENTINEL_START + uuid4().hex, dict[str, Segment](), list[dict[str, Any]]()
    for message, content in zip(messages, contents, strict=True):
        texts = list[Segment]()
        for segment in content:
            sentinel = f"{start}N{len(chunks):06d}E"  # in no text
            if is_read_apart(segment):
                chunks[sentinel] = segment
            texts.append(Text(sentinel) if is_read_apart(segment) else segment)
        replaced.append(_with_content(message, texts))
    try:
        with_sentinels = render(replaced)
    except Exception as error:  # a template may do anything with contents it does not expect
        why = f"{type(error).__name__}: {error}"[:200]
        return [], f"the chat template fails on contents with the chunks taken out ({why})"
    pieces = re.split(f"({start}N[0-9]{{6}}E)", with_sentinels)
    if pieces[1::2] != list(chunks):
        return [], "the chat template drops, repeats, reorders or rewrites message contents"
    segments = merge_texts(chunks[p] if i % 2 else Text(p) for i, p in enumerate(pieces))
    if _joined(segments) != rendered:
        return [], "the chat template changes chunk texts (trims, escapes) or renders differently each time"
    return segments, ""


# -- registered chunks ---------------------------------------------------------------------------------

_BASE_BUDGET, _BUDGET_PER_CHAR = 100_000, 8
_JOINER = "\u200d"


class Matches(NamedTuple):
    """Occurrences ``text[start:end]`` of registered chunks from left to right, as ``(start, end)``.

    ``searched`` is how many characters were, if not the whole text.
    """

    found: tuple[Span, ...]
    searched: int | None = None


def forms(text: str) -> tuple[str, ...]:
    """Forms under which a chunk text is searched for: itself, then itself without outer whitespace.

    Chains and templates may strip documents. The longest form that a prompt has is the one found.
    """
    stripped = text.strip()
    return (text,) if stripped == text else (text, stripped)


class ChunkRegistry:
    """Registered chunk texts per namespace, all found in one pass over a prompt. Thread safe.

    A full namespace, of ``max_chunks`` (a text with outer whitespace counts twice, see :func:`forms`), evicts
    the chunk that was neither registered nor found for longest. ``min_chars`` is the length of the shortest
    text registered, outer whitespace aside: shorter ones are found everywhere.
    """

    def __init__(self, max_chunks: int = 100_000, min_chars: int = 16) -> None:
        self.max_chunks, self.min_chars = max_chunks, min_chars
        self._lock = threading.Lock()
        self._namespaces: dict[str, _Namespace] = {}

    def add(self, namespace: str, texts: Sequence[str], named: Mapping[str, str] | None = None) -> int:
        """Register chunk texts; known ones count as used now. Returns how many are long enough.

        In prompts, chunk ids may stand for the texts in ``named``.
        """
        taken = [text for text in texts if len(text.strip()) >= self.min_chars]
        if taken or named:
            with self._lock:
                registered = self._namespaces.setdefault(namespace, _Namespace(self.min_chars))
                for text in taken:
                    registered.put(text, self.max_chunks)
                registered.name(named or {}, self.max_chunks)
        return len(taken)

    def named(self, namespace: str) -> dict[str, str]:
        """The texts, of any length, that chunk ids stand for; a forget removes some."""
        known = self._namespaces.get(namespace)
        return known.named if known else {}

    def text(self, namespace: str, name: str) -> str:
        """The text of a chunk id; UnknownChunk, whatever other namespaces know, if there is none."""
        text = self.named(namespace).get(name) if isinstance(name, str) else None
        if text is None:
            raise UnknownChunk(
                f"the chunk id {name!r:.80} names no text in the namespace {namespace!r}: this process did "
                "not encode it there, or has forgotten it; give the text, or encode it again and take the id "
                "that is returned (what is stored is not computed again)"
            )
        return text

    def forget(self, namespace: str, texts: Iterable[str] | None) -> None:
        """Forget texts and their stripped forms; with None, the whole namespace."""
        with self._lock:
            if texts is None:
                self._namespaces.pop(namespace, None)
            elif known := self._namespaces.get(namespace):
                for text in texts:
                    known.drop(text)

    def texts(self, namespace: str) -> list[str]:
        """The registered texts in all forms, the one registered or found last at the end."""
        with self._lock:
            known = self._namespaces.get(namespace)
            return list(known.lru) if known else []

    def find(self, namespace: str, text: str) -> Matches:
        """The leftmost, longest occurrences of the namespace's chunks; these count as used just now."""
        with self._lock:
            known = self._namespaces.get(namespace)
            if known is None:
                return Matches(())
            matches = known.index.find(text)
            for start, end in matches.found:
                for form in reversed(forms(text[start:end])):
                    if form in known.lru:
                        known.lru.move_to_end(form)
        return matches

    def nothing_found(self, namespace: str) -> str:
        """Why a prompt has no chunk of the namespace, and what to do."""
        if self.texts(namespace):
            return (
                f"no chunk registered in namespace {namespace!r} occurs verbatim in the prompt: cut, in "
                "another case, re-wrapped, or with a word that runs on, a chunk is not recognised; put the "
                "texts into the prompt as they are (LangChain: format_docs), or register what the chain makes"
            )
        return (
            f"no chunk is registered in namespace {namespace!r}: wrap the retriever, give the texts to "
            f"encode or register, or mark the chunks in the prompt (always below {self.min_chars} characters)"
        )


class _Namespace:
    def __init__(self, min_chars: int) -> None:
        self.lru: OrderedDict[str, None] = OrderedDict()
        self.named: dict[str, str] = {}  # texts by chunk id
        self.index = _AnchorIndex(min_chars)

    def put(self, text: str, limit: int) -> None:
        if text in self.lru:
            self.lru.move_to_end(text)  # or the insert of its stripped form could evict it
        for form in reversed(forms(text)):  # the stripped form first, so that it is evicted first
            if form not in self.lru:
                self.index.add(form)
            self.lru[form] = None
            self.lru.move_to_end(form)
            if len(self.lru) > limit:
                self.index.remove(self.lru.popitem(last=False)[0])

    def name(self, named: Mapping[str, str], limit: int) -> None:
        others = {name: text for name, text in self.named.items() if name not in named}
        self.named = dict([*others.items(), *named.items()][-limit:])

    def drop(self, text: str) -> None:
        for form in forms(text):
            if form in self.lru:
                del self.lru[form]
                self.index.remove(form)


class _AnchorIndex:
    """Texts that are searched for all at once: a dictionary of their first characters, then a bisection."""

    def __init__(self, chars: int) -> None:
        self._chars = chars
        self._texts: dict[str, list[str]] = {}  # by anchor, sorted
        self._longest: dict[str, int] = {}

    def add(self, text: str) -> None:
        anchor = text[: self._chars]
        insort(self._texts.setdefault(anchor, []), text)
        self._longest[anchor] = max(self._longest.get(anchor, 0), len(text))

    def remove(self, text: str) -> None:
        anchor = text[: self._chars]
        texts = self._texts[anchor]
        del texts[bisect_left(texts, text)]
        if not texts:
            del self._texts[anchor], self._longest[anchor]

    def find(self, text: str) -> Matches:
        """The leftmost, longest occurrences, in about ``8 len(text) + 100,000`` short comparisons at most."""
        found, end, budget = list[Span](), 0, _BASE_BUDGET + _BUDGET_PER_CHAR * len(text)
        edges = [at for at, char in enumerate(text) if not char.isalnum()]
        for start in sorted({0, *edges, *(at + 1 for at in edges)}):  # all others are inside a word
            anchor = text[start : start + self._chars]
            if start < end or anchor not in self._texts or is_inside_word(text, start):
                continue
            length, budget = self._match(text, start, anchor, budget)
            if budget < 0:
                return Matches(tuple(found), start)
            if length:
                end = start + length
                found.append((start, end))
        return Matches(tuple(found))

    def _match(self, prompt: str, start: int, anchor: str, budget: int) -> tuple[int, int]:
        """Length of the longest text at ``start``, and the budget left."""
        texts, window = self._texts[anchor], prompt[start : start + self._longest[anchor]]
        while window and budget >= 0:
            number = bisect_right(texts, window) - 1
            budget -= (len(texts).bit_length() + 2) * (1 + (len(window) >> 6))
            if number < 0:
                break
            # A text that the window begins with is no longer than what it shares with its predecessor.
            length = common_length(texts[number], window)
            if length < len(texts[number]):
                window = window[:length]
            elif is_inside_word(prompt, start + length):
                window = window[: length - 1]
            else:
                return length, budget
        return 0, budget


def is_inside_word(text: str, edge: int) -> bool:
    """Whether the position ``edge`` is inside a word, or between a character and its marks."""
    if edge <= 0 or edge >= len(text):
        return False
    left, right = text[edge - 1], text[edge]
    if _JOINER in (left, right) or _is_mark(right):
        return True
    return (left.isalnum() or _is_mark(left)) and right.isalnum()


def _is_mark(char: str) -> bool:
    return char > "\u02ff" and unicodedata.category(char)[0] == "M"
