"""How much of a prompt's chunks is recognised, per text splitter of LangChain: a table for the docs.

``python -m benchmarks.splitters docs/*.md`` needs the sample model's tokenizer, and no model.
"""

from __future__ import annotations

import html
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from langchain_core.documents import Document
from langchain_text_splitters import (
    HTMLHeaderTextSplitter,
    MarkdownHeaderTextSplitter,
    RecursiveCharacterTextSplitter,
    split_text_on_tokens,
)
from langchain_text_splitters.base import Tokenizer

from langchain_ragcachekit.format_docs import format_docs
from ragcachekit.engine.prompt_segmenter import PromptSegmenter
from ragcachekit.types import Chunk

NEIGHBOURS = 4
"""Chunks of a prompt: that many in a row, the worst case for overlaps."""

Split = Callable[[str], list[Any]]


def splitters(tokenizer: Any) -> dict[str, Split]:
    """LangChain's splitters by their name in the table; each makes documents of a Markdown text."""
    headers = [(f"{'#' * n}", f"h{n}") for n in (1, 2, 3)]
    tags = [(f"h{n}", f"h{n}") for n in (1, 2, 3)]

    def recursive(size: int, overlap: int) -> Split:
        split = RecursiveCharacterTextSplitter(chunk_size=size, chunk_overlap=overlap)
        return lambda text: split.create_documents([text])

    def tokens(overlap: int) -> Split:
        """What TokenTextSplitter does, with the model's tokenizer."""
        windows = Tokenizer(
            overlap, 120, tokenizer.decode, lambda text: list(tokenizer(text, verbose=False).input_ids)
        )
        return lambda text: [Document(one) for one in split_text_on_tokens(text=text, tokenizer=windows)]

    def parents_with_children(text: str) -> list[Any]:
        """Parents stand in the prompt; their children are registered as well."""
        return recursive(1200, 0)(text)

    return {
        "Recursive, 600 characters, no overlap": recursive(600, 0),
        "Recursive, 600 characters, overlap 120": recursive(600, 120),
        "Recursive, 300 characters, overlap 150": recursive(300, 150),
        "Tokens, 120, no overlap": tokens(0),
        "Tokens, 120, overlap 30": tokens(30),
        "Markdown headers": MarkdownHeaderTextSplitter(headers).split_text,
        "HTML headers": lambda text: HTMLHeaderTextSplitter(tags).split_text(as_html(text)),
        "Parents of 1,200 characters, children of 300 registered": parents_with_children,
    }


def measure(texts: Iterable[str], split: Split, children: Split | None, tokenizer: Any) -> tuple[float, ...]:
    """Share of the chunks and of their tokens that are recognised, and number of wrong boundaries."""
    segmenter = PromptSegmenter(tokenizer)
    documents = [split(text) for text in texts]
    for chunks in documents:
        segmenter.registry.add("docs", [d.page_content for d in chunks])
        for chunk in chunks if children else ():
            segmenter.registry.add("docs", [d.page_content for d in (children or split)(chunk.page_content)])
    found = asked = found_tokens = asked_tokens = wrong = 0
    for chunks in documents:
        for at in range(0, max(len(chunks) - NEIGHBOURS, 0) + 1, NEIGHBOURS):
            stuffed = chunks[at : at + NEIGHBOURS]
            messages = [
                {"role": "system", "content": f"Answer from the context.\n\n{format_docs(stuffed)}"},
                {"role": "user", "content": "What is it?"},
            ]
            seen = segmenter.segment(messages, "docs").prompt.segments
            texts_found = [s.text or "" for s in seen if isinstance(s, Chunk)]
            expected = [d.page_content.strip() for d in stuffed]
            right = [text for text in texts_found if text.strip() in expected]
            wrong += len(texts_found) - len(right)
            found, asked = found + len(right), asked + len(expected)
            found_tokens += _tokens(segmenter, [text.strip() for text in right])
            asked_tokens += _tokens(segmenter, expected)
    return len(documents), asked, found / asked, found_tokens / asked_tokens, wrong


def as_html(markdown: str) -> str:
    """Headers and paragraphs of a Markdown text."""
    blocks = re.split(r"\n\n+", markdown)
    lines = []
    for block in blocks:
        header = re.match(r"(#{1,3}) (.*)", block)
        tag = f"h{len(header[1])}" if header else "p"
        lines.append(f"<{tag}>{html.escape(header[2] if header else block)}</{tag}>")
    return f"<html><body>{''.join(lines)}</body></html>"


def _tokens(segmenter: PromptSegmenter, texts: Sequence[str]) -> int:
    return sum(len(segmenter.chunk_ids(text)) for text in texts)


def main(paths: Sequence[str]) -> None:
    """Print the table for these files."""
    from transformers import AutoTokenizer

    from ragcachekit.commands.sample_model import sample_model

    tokenizer = AutoTokenizer.from_pretrained(sample_model())
    texts = [Path(path).read_text(encoding="utf-8") for path in paths]
    print("| splitter | chunks | found | share of their tokens | wrong boundaries |")
    print("|---|---|---|---|---|")
    ways = splitters(tokenizer)
    for name, split in ways.items():
        children = ways["Recursive, 300 characters, overlap 150"] if "children" in name else None
        _, asked, found, tokens, wrong = measure(texts, split, children, tokenizer)
        print(f"| {name} | {asked:.0f} | {found:.1%} | {tokens:.1%} | {wrong:.0f} |")


if __name__ == "__main__":
    main(sys.argv[1:])
