"""Chunks of chat messages, located in the text that the chat template renders."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any
from uuid import uuid4

from ragcachekit.prompt.registry import ChunkRegistry
from ragcachekit.prompt.segments import Segmentation, is_read_apart, merge_texts, segment_text
from ragcachekit.prompt.special_tokens import SpecialTokenTexts, plain_count, plain_note
from ragcachekit.types import Chunk, Segment, Text

MARK = "chunk"
"""Key of a content block: whether the block's text is a chunk."""

Message = Mapping[str, Any]
Render = Callable[[list[dict[str, Any]]], str]

# The start of a chunk's sentinel. Letters and digits alone, which no template escapes or reformats, and one
# Z: no occurrence begins in the text before it.
_SENTINEL_START = "Zq7xChunk"


def marked(text: str) -> dict[str, Any]:
    """A content block whose text is a chunk, registered or not."""
    return {"type": "text", "text": text, MARK: True}


def segment_messages(
    messages: Sequence[Message],
    render: Render,
    registry: ChunkRegistry,
    namespace: str,
    special: SpecialTokenTexts,
) -> Segmentation:
    """Render chat messages and cut the rendered text at the chunks in their contents.

    Marked blocks (:func:`marked`) are chunks; the other text is searched for registered chunks. Every
    chunk is replaced by a sentinel, the messages are rendered, and the chunks are put back. The result is
    used only if it equals the rendered messages. Else (a template trims, escapes, reorders or prints the
    time) the prompt is a plain prefill with the reason in ``fallback``.

    Special-token strings in contents become plain text where a retrieved text has them, also in a plain
    prefill. The template's own stay control tokens.

    ``messages`` have a ``role`` and a ``content``: a string, None, or a list of strings and text blocks that
    are joined without a separator. ``render`` makes the prompt's text of messages with string contents,
    generation prompt included; what it raises for the messages themselves is passed on. ValueError or
    TypeError for messages that are not of this form.
    """
    contents = [_content_segments(message) for message in messages]
    rendered = render([_with_content(m, c) for m, c in zip(messages, contents, strict=True)])
    searched, notes = _search(contents, registry, namespace)
    reason = ""
    for attempt in _attempts(special.split_contents(namespace, searched)):
        segments, reason = _through_template(messages, attempt, rendered, render)
        if segments:
            return _noted(segments, notes)
    segments = _without_chunks(messages, searched, rendered, render, special, namespace)
    has_chunks = any(isinstance(s, Chunk) for content in searched for s in content)
    return replace(_noted(segments, notes), fallback=reason if has_chunks else None)


def _noted(segments: Sequence[Segment], notes: tuple[str, ...]) -> Segmentation:
    count = plain_count(segments)
    return Segmentation(tuple(segments), (*notes, *([plain_note(count)] if count else [])))


def _without_chunks(
    messages: Sequence[Message],
    contents: Sequence[Sequence[Segment]],
    rendered: str,
    render: Render,
    special: SpecialTokenTexts,
    namespace: str,
) -> list[Segment]:
    chunks = [s.text for content in contents for s in content if isinstance(s, Chunk) and s.text]
    texts = [merge_texts(Text(s.text or "") for s in content) for content in contents]
    split = special.split_contents(namespace, texts, chunks)
    segments, _ = _through_template(messages, split, rendered, render)
    # Where not even that comes through the template, the characters around an occurrence must decide.
    return segments or special.split(namespace, [Text(rendered)] if rendered else [], chunks)


def _content_segments(message: Message) -> list[Segment]:
    if not isinstance(message, Mapping):
        raise TypeError(
            f"a message must be a mapping with 'role' and 'content', got {type(message).__name__}; "
            "several prompts go to generate_batch"
        )
    if "role" not in message or "content" not in message:
        raise ValueError(f"a message needs 'role' and 'content', got {sorted(message)}")
    content = message["content"]
    if content is None or isinstance(content, str):
        return merge_texts([Text(content or "")])
    if not isinstance(content, Iterable):
        raise TypeError(f"content must be str or a list of text blocks, not {type(content).__name__}")
    return merge_texts(_block_segment(block) for block in content)


def _block_segment(block: object) -> Segment:
    if isinstance(block, str):
        return Text(block)
    if not isinstance(block, Mapping) or block.get("type", "text") != "text":
        kind = block.get("type") if isinstance(block, Mapping) else type(block).__name__
        raise ValueError(f"only text blocks can be used in a prompt, got {kind!r}; leave other blocks out")
    text = block.get("text")
    if not isinstance(text, str):
        raise TypeError(f"a text block needs a 'text' string, got {type(text).__name__}")
    # Whitespace alone is no chunk: there is nothing to reuse.
    return Chunk(text) if block.get(MARK) and text.strip() else Text(text)


def _with_content(message: Message, content: Sequence[Segment]) -> dict[str, Any]:
    if message["content"] is None:
        return dict(message)  # for templates, a missing content (tool calls) is not an empty one
    return {**message, "content": "".join(s.text or "" for s in content)}


def _search(
    contents: Sequence[Sequence[Segment]], registry: ChunkRegistry, namespace: str
) -> tuple[list[list[Segment]], tuple[str, ...]]:
    searched: list[list[Segment]] = []
    notes: list[str] = []
    for number, content in enumerate(contents, 1):
        segments: list[Segment] = []
        for segment in content:
            if isinstance(segment, Chunk):
                segments.append(segment)
                continue
            result = segment_text(segment.text or "", registry, namespace)
            segments += result.segments
            notes += (f"message {number}: {note}" for note in result.notes)
        searched.append(segments)
    return searched, tuple(notes)


def _attempts(contents: list[list[Segment]]) -> Iterable[list[list[Segment]]]:
    """The contents, then with the whitespace at a message's ends left out of its chunks: templates trim."""
    yield contents
    trimmed = [_edges_outside(content) for content in contents]
    if trimmed != contents:
        yield trimmed


def _edges_outside(content: Sequence[Segment]) -> list[Segment]:
    segments = list(content)
    if segments and isinstance(first := segments[0], Chunk):
        body = (first.text or "").lstrip()
        segments[:1] = [Text((first.text or "")[: -len(body)]), Chunk(body)]
    if segments and isinstance(last := segments[-1], Chunk):
        body = (last.text or "").rstrip()
        segments[-1:] = [Chunk(body), Text((last.text or "")[len(body) :])]
    return merge_texts(segments)


def _through_template(
    messages: Sequence[Message], contents: Sequence[Sequence[Segment]], rendered: str, render: Render
) -> tuple[list[Segment], str]:
    """The rendered prompt's segments, or none and the reason why they cannot be had."""
    if not any(is_read_apart(s) for content in contents for s in content):
        return [Text(rendered)] if rendered else [], ""
    salt = uuid4().hex  # in no text
    chunks: dict[str, Segment] = {}
    stand_ins = [[_stand_in(s, salt, chunks) for s in content] for content in contents]
    try:
        with_sentinels = render([_with_content(m, c) for m, c in zip(messages, stand_ins, strict=True)])
    except Exception as error:  # a template may do anything with contents it does not expect
        why = f"{type(error).__name__}: {error}"[:200]
        return [], f"the chat template fails on contents with the chunks taken out ({why})"
    pieces = re.split(f"({_SENTINEL_START}{salt}N[0-9]{{6}}E)", with_sentinels)
    if pieces[1::2] != list(chunks):
        return [], "the chat template drops, repeats, reorders or rewrites message contents"
    segments = merge_texts(chunks[p] if i % 2 else Text(p) for i, p in enumerate(pieces))
    if "".join(s.text or "" for s in segments) != rendered:
        return [], "the chat template changes chunk texts (trims, escapes) or renders differently each time"
    return segments, ""


def _stand_in(segment: Segment, salt: str, chunks: dict[str, Segment]) -> Segment:
    if not is_read_apart(segment):
        return segment
    sentinel = f"{_SENTINEL_START}{salt}N{len(chunks):06d}E"
    chunks[sentinel] = segment
    return Text(sentinel)
