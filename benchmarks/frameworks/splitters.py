"""How much of a prompt's chunks is recognised, per text splitter of LangChain: a table for the docs.

``python -m benchmarks.frameworks.splitters docs/*.md`` needs the sample model's tokenizer, and no model.
"""

from __future__ import annotations

import html
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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
from ragcachekit.prompt.parser import PromptParser
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


@dataclass
class Found:
    """Counts of one splitter: chunks, their tokens, boundaries that are no chunk's, characters of the texts.

    ``missed`` are the chunks that were not found.
    """

    chunks: int = 0
    found: int = 0
    tokens: int = 0
    found_tokens: int = 0
    wrong: int = 0
    characters: int = 0
    found_characters: int = 0
    missed: list[str] = field(default_factory=list)

    def row(self, name: str) -> str:
        """The splitter's line in a Markdown table."""
        shares = (
            self.found / self.chunks,
            self.found_tokens / self.tokens,
            self.found_characters / self.characters,
        )
        longest = max(map(len, self.missed), default=0)
        cells = (f"{self.chunks:,}", *(f"{100 * share:.1f} %" for share in shares), self.wrong, longest)
        return " | ".join(map(str, ("", name, *cells, ""))).strip()


def measure(texts: Sequence[str], split: Split, children: Split | None, tokenizer: Any) -> Found:
    """What is recognised of a splitter's chunks; ``children`` of them are registered, too."""
    parser, counts = PromptParser(tokenizer), Found()
    documents = [split(text) for text in texts]
    for chunks in documents:
        small = [one for chunk in chunks for one in (children(chunk.page_content) if children else ())]
        parser.registry.add("docs", [d.page_content for d in (*chunks, *small)])

    def found(prompt: Any) -> list[str]:
        segments = parser.segment(prompt, "docs").segments
        return [(s.text or "").strip() for s in segments if isinstance(s, Chunk)]

    for text, chunks in zip(texts, documents, strict=True):
        counts.characters += len(text)
        counts.found_characters += sum(map(len, found(text)))
        for at in range(0, len(chunks), NEIGHBOURS):
            stuffed = chunks[at : at + NEIGHBOURS]
            system = f"Answer from the context.\n\n{format_docs(stuffed)}"
            messages = [{"role": "system", "content": system}, {"role": "user", "content": "What is it?"}]
            expected, seen = Counter(d.page_content.strip() for d in stuffed), Counter(found(messages))
            right = expected & seen
            counts.wrong += (seen - expected).total()
            counts.missed += expected - seen
            counts.chunks, counts.found = counts.chunks + expected.total(), counts.found + right.total()
            counts.tokens += sum(len(parser.chunk_ids(one)) for one in expected.elements())
            counts.found_tokens += sum(len(parser.chunk_ids(one)) for one in right.elements())
    return counts


def as_html(markdown: str) -> str:
    """Headers and paragraphs of a Markdown text."""
    blocks = re.split(r"\n\n+", markdown)
    lines = []
    for block in blocks:
        header = re.match(r"(#{1,3}) (.*)", block)
        tag = f"h{len(header[1])}" if header else "p"
        lines.append(f"<{tag}>{html.escape(header[2] if header else block)}</{tag}>")
    return f"<html><body>{''.join(lines)}</body></html>"


def main(paths: Sequence[str]) -> None:
    """Print the table for these files."""
    from transformers import AutoTokenizer

    from ragcachekit.commands.sample_model import sample_model

    tokenizer = AutoTokenizer.from_pretrained(sample_model())
    texts = [Path(path).read_text(encoding="utf-8") for path in paths]
    print("| splitter | chunks | found | share of tokens | of the original | wrong | longest missed |")
    print("|---|---|---|---|---|---|---|")
    ways = splitters(tokenizer)
    for name, split in ways.items():
        children = ways["Recursive, 300 characters, overlap 150"] if "children" in name else None
        print(measure(texts, split, children, tokenizer).row(name))


if __name__ == "__main__":
    main(sys.argv[1:])
