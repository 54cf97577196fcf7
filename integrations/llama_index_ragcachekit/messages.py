"""LlamaIndex messages as the dicts that the engine's chat templates take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, ContentBlock, MessageRole, TextBlock, ThinkingBlock

ROLES = {
    MessageRole.SYSTEM: "system",
    MessageRole.DEVELOPER: "system",
    MessageRole.USER: "user",
    MessageRole.ASSISTANT: "assistant",
    MessageRole.CHATBOT: "assistant",
    MessageRole.MODEL: "assistant",
}


def to_dicts(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Convert messages to ``{"role", "content"}``.

    ValueError for tool messages and for blocks that are not text, naming the role or the block's type.
    """
    return [{"role": _role(message), "content": _content(message)} for message in messages]


def _role(message: ChatMessage) -> str:
    if message.role not in ROLES:
        raise ValueError(
            f"{message.role.value!r} messages cannot be used: this model does not call tools; "
            "put a tool's result into a user message"
        )
    return ROLES[message.role]


def _content(message: ChatMessage) -> str | list[dict[str, Any]]:
    texts = [_text(block) for block in message.blocks if not isinstance(block, ThinkingBlock)]
    # One string where possible: most chat templates take nothing else.
    return texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]


def _text(block: ContentBlock) -> str:
    if not isinstance(block, TextBlock):
        raise ValueError(f"{block.block_type!r} blocks cannot be used: this model reads text only")
    return block.text
