"""From a user's prompt to tokenised segments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ragcachekit.model.encoding import Ids
from ragcachekit.model.tokens import SegmentTokenizer
from ragcachekit.plan.encodings import TokenSegment
from ragcachekit.prompt.base import Segmentation
from ragcachekit.prompt.messages import segment_messages
from ragcachekit.prompt.registry import ChunkRegistry
from ragcachekit.prompt.segment import blanks_outside, body, segment_text
from ragcachekit.prompt.special_tokens import SpecialTokenTexts, plain_count, plain_note
from ragcachekit.types import Chunk, Prompt, Segment, Text


@dataclass(frozen=True)
class ChatWithTools:
    """Chat messages, and the tools that the chat template renders with them."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]]


PromptLike = str | Prompt | Sequence[Mapping[str, Any]] | ChatWithTools
"""A prompt: a string, chat messages, or explicit segments."""

_CERTAIN = "chat messages tell them from the template's own for certain"


class PromptSegmenter:
    """Finds registered chunks in prompts and tokenises segments one by one.

    Without a tokenizer, prompts are segments of token ids.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokens = SegmentTokenizer(tokenizer) if tokenizer is not None else None
        self.registry = ChunkRegistry()
        self.special_tokens = SpecialTokenTexts(self._tokens.special_tokens if self._tokens else ())

    @property
    def tokens(self) -> SegmentTokenizer:
        """The tokenizer; ValueError if there is none."""
        if self._tokens is None:
            raise ValueError("this RagCache has no tokenizer; give token ids, or a tokenizer when making it")
        return self._tokens

    @property
    def has_chat_template(self) -> bool:
        """Whether the tokenizer has a chat template."""
        return self._tokens is not None and bool(self._tokens.tokenizer.chat_template)

    @property
    def pad(self) -> int:
        """Token id for padding."""
        return self._tokens.pad if self._tokens else 0

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

    def text_before(self, system: str) -> Ids:
        """Token ids of a system text before a prompt's first chunk."""
        if not system:  # then only what the tokenizer puts in front
            return self.tokens.leading
        return self.tokenise(Prompt([Text(system)]), leading=True)[0].token_ids

    def segment(self, prompt: PromptLike, namespace: str) -> Segmentation:
        """The prompt's segments: as given, or by the registered chunks in it."""
        if isinstance(prompt, Prompt):
            return self._split(Segmentation(prompt), namespace)
        if isinstance(prompt, str):
            return self._split(segment_text(prompt, self.registry, namespace), namespace)
        tools = prompt.tools if isinstance(prompt, ChatWithTools) else None
        messages = prompt.messages if isinstance(prompt, ChatWithTools) else prompt
        if isinstance(messages, Sequence):
            render = partial(self.tokens.render, tools=tools)
            return segment_messages(messages, render, self.registry, namespace, self.special_tokens)
        raise TypeError(f"a prompt is a str, a list of messages or a Prompt, not {type(prompt).__name__}")

    def with_tools(self, prompt: PromptLike, tools: Sequence[Mapping[str, Any]] | None) -> PromptLike:
        """The prompt with tools for its chat template.

        ValueError if the prompt is no list of messages, or the template does not render tools.
        """
        if not tools:
            return prompt
        if isinstance(prompt, str | Prompt | ChatWithTools):
            raise ValueError("tools= needs chat messages: another prompt does not go through a chat template")
        if not self.tokens.renders_tools:
            raise ValueError(
                "the model's chat template does not render tools; describe them in a message, or take a "
                "model whose template does"
            )
        return ChatWithTools(prompt, tools)

    def _split(self, segmentation: Segmentation, namespace: str) -> Segmentation:
        prompt = segmentation.prompt
        segments = self.special_tokens.split(namespace, prompt.segments)
        count = plain_count(segments) - plain_count(prompt.segments)
        notes = (f"{plain_note(count)}; {_CERTAIN}",) if count else ()
        return replace(segmentation, prompt=Prompt(segments, (*prompt.notes, *notes)))

    def tokenise(
        self, prompt: Prompt, leading: bool, texts: dict[Ids, str] | None = None
    ) -> list[TokenSegment]:
        """Token ids per segment; ``leading``: after what the tokenizer puts in front of plain text (BOS).

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

    def _ids(self, segment: Segment, first: bool) -> Ids:
        if segment.token_ids is not None:
            return segment.token_ids
        text = segment.text or ""
        if isinstance(segment, Chunk):
            return self.chunk_ids(text)
        if isinstance(segment, Text) and segment.split_special_tokens:
            return self.tokens.chunk(text)
        return self.tokens.text(text, first=first)
