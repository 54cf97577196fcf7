"""Prompts of the engine out of OpenAI's messages, and the documents of a request in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ragcachekit import Chunk, Prompt, Text
from ragcachekit.prompt.messages import marked
from ragcachekit.server.errors import invalid, unsupported
from ragcachekit.server.schemas import Document, Message, Part

MARKER = "{documents}"
"""Where documents go in a text; without it, they go before the last user message's text."""

BETWEEN = "\n\n"

Block = dict[str, Any]


def document_text(document: str | Document) -> str:
    """The text of a document's chunk."""
    if isinstance(document, str):
        return document
    return f"{document.title}\n{document.text}" if document.title else document.text


def chat_prompt(
    messages: Sequence[Message], documents: Sequence[str], renders_tools: Callable[[], bool]
) -> list[dict[str, Any]]:
    """Messages for the engine, with the documents among them as chunks.

    ApiError 400 for content that is not text, for tools that the chat template does not render, and for
    documents without a place.
    """
    if any(m.tool_calls or m.role == "tool" for m in messages) and not renders_tools():
        raise unsupported("messages", "Messages with tool calls need a model whose chat template has tools.")
    plain = [_message(number, message) for number, message in enumerate(messages)]
    if documents:
        _place(plain, documents)
    return plain


def text_prompt(prompt: str | Sequence[int], documents: Sequence[str]) -> str | Prompt:
    """A prompt of a text, or of token ids, with the documents before it or at its marker."""
    if isinstance(prompt, str) and not documents:
        return prompt
    chunks = [segment for document in documents for segment in (Chunk(document), Text(BETWEEN))]
    if not isinstance(prompt, str):
        return Prompt([*chunks, Text(token_ids=tuple(prompt))])
    before, found, after = prompt.partition(MARKER)
    return Prompt([Text(before), *chunks[:-1], Text(after)] if found else [*chunks, Text(prompt)])


def size_of(prompt: Any) -> tuple[int, int, int]:
    """Characters, token ids and chunks of a prompt for the engine."""
    if isinstance(prompt, str):
        return len(prompt), 0, 0
    ids = 0
    if isinstance(prompt, Prompt):
        parts = [(segment.text or "", isinstance(segment, Chunk)) for segment in prompt.segments]
        ids = sum(len(segment.token_ids or ()) for segment in prompt.segments)
    else:
        blocks = [block for message in prompt for block in _blocks(message["content"])]
        parts = [(block["text"], "chunk" in block) for block in blocks]
    return sum(len(text) for text, _ in parts), ids, sum(is_chunk for _, is_chunk in parts)


def _message(number: int, message: Message) -> dict[str, Any]:
    place = f"messages[{number}]"
    content: Any = message.content
    if isinstance(content, list):
        content = [_block(f"{place}.content[{at}]", part) for at, part in enumerate(content)]
    if content is None and not message.tool_calls:
        text = f"Invalid value for 'content': expected a string or a list, got null in message {number}."
        raise invalid(text, f"{place}.content")
    out: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": content,
    }
    if message.name:
        out["name"] = message.name
    if message.role == "tool":
        out["tool_call_id"] = message.tool_call_id or ""
    if message.tool_calls:
        out["tool_calls"] = [
            {
                "type": "function",
                "id": call.id,
                "function": {"name": call.function.name, "arguments": call.function.arguments},
            }
            for call in message.tool_calls
        ]
    return out


def _block(place: str, part: Part) -> Block:
    if part.type == "refusal":
        return _text(part.refusal or "")
    if part.type != "text":
        raise invalid(f"Invalid value: '{part.type}'. This model reads text only.", f"{place}.type")
    if part.text is None:
        text = f"Missing required parameter: '{place}.text'."
        raise invalid(text, f"{place}.text", "missing_required_parameter")
    return marked(part.text) if part.cache_control or part.prompt_cache_breakpoint else _text(part.text)


def _place(messages: list[dict[str, Any]], documents: Sequence[str]) -> None:
    """Put documents at the last marker, else before the last user message's content."""
    chunks: list[Block] = []
    for document in documents:
        chunks += [marked(document), _text(BETWEEN)]
    for message in reversed(messages):
        blocks = _blocks(message["content"])
        for at, block in enumerate(blocks):
            if MARKER in block["text"] and "chunk" not in block:
                before, _, after = block["text"].partition(MARKER)
                inside = [_text(before), *chunks[:-1], _text(after)]
                message["content"] = [*blocks[:at], *inside, *blocks[at + 1 :]]
                return
    for message in reversed(messages):
        if message["role"] == "user":
            message["content"] = [*chunks, *_blocks(message["content"])]
            return
    raise invalid(f"Documents need a user message, or the text {MARKER} in a message.", "documents")


def _blocks(content: Any) -> list[Block]:
    if isinstance(content, list):
        return content
    return [_text(content)] if content else []


def _text(text: str) -> Block:
    return {"type": "text", "text": text}
