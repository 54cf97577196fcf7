"""Chunks of LangChain's splitters and LlamaIndex's semantic one: each found once, at its own edges."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from integration_kit import FACTS
from langchain_core.documents import Document
from langchain_text_splitters import (
    HTMLHeaderTextSplitter,
    MarkdownHeaderTextSplitter,
    RecursiveCharacterTextSplitter,
    split_text_on_tokens,
)
from langchain_text_splitters.base import Tokenizer
from llama_index.core import Document as LlamaIndexDocument
from llama_index.core.node_parser import SemanticSplitterNodeParser
from llama_kit import Embedder

from langchain_ragcachekit import format_docs
from ragcachekit.prompt.registry import ChunkRegistry
from ragcachekit.prompt.segments import segment_text
from ragcachekit.types import Chunk

LEAST = 16  # characters of the shortest chunk that is registered


def found(prompt, registered):
    """Texts of the chunks that are found, and their places."""
    registry = ChunkRegistry()
    registry.add("a", registered)
    places, at = [], 0
    for segment in segment_text(prompt, registry, "a").segments:
        if isinstance(segment, Chunk):
            places.append((at, segment.text))
        at += len(segment.text)
    assert at == len(prompt)
    return places


@settings(max_examples=120, deadline=None)
@given(
    st.lists(st.sampled_from([" ", " ", " ", ". ", "\n", "\n\n", " - "]), min_size=20, max_size=120),
    st.integers(20, 200),
    st.floats(0, 0.6),
    st.randoms(use_true_random=False),
)
def test_overlapping_neighbours_are_each_found_at_their_own_edges(separators, size, share, random):
    # Words are numbered, so that every chunk has one place in the text.
    text = "".join(f"word{n}{separator}" for n, separator in enumerate(separators))
    split = RecursiveCharacterTextSplitter(chunk_size=size, chunk_overlap=int(size * share))
    chunks = [chunk for chunk in split.split_text(text) if len(chunk) >= LEAST]
    stuffed = [Document(chunk) for chunk in chunks]
    assert [text for _, text in found(format_docs(stuffed), chunks)] == chunks
    random.shuffle(stuffed)
    assert [text for _, text in found(f"C: {format_docs(stuffed)}\nQ?", chunks)] == [
        document.page_content for document in stuffed
    ]


@settings(max_examples=80, deadline=None)
@given(st.integers(40, 120), st.integers(30, 200), st.floats(0, 0.6))
def test_in_the_text_that_they_overlap_in_chunks_are_found_once_and_at_word_edges(words, size, share):
    text = " ".join(f"word{n}" for n in range(words))
    split = RecursiveCharacterTextSplitter(chunk_size=size, chunk_overlap=int(size * share))
    chunks = split.split_text(text)
    places = found(text, chunks)
    assert places
    end = 0
    for at, chunk in places:
        assert at >= end, "found once: no character belongs to two chunks"
        end = at + len(chunk)
        assert chunk in chunks
        assert text[at:end] == chunk
        assert not (at and text[at - 1].isalnum())
        assert end == len(text) or not text[end].isalnum()


MARKDOWN = """# Bern

Ada Lind was born here. She works as a baker.

## Food

The bread of the town is dark & "heavy".

| what | price |
|---|---|
| bread | 3.50 |

# Oslo

Its harbour is frozen for a month in most winters.
"""
HTML = (
    "<html><body><h1>Bern</h1><p>Ada Lind was born here.\n  She works as a baker.</p><h2>Food</h2>"
    "<p>The bread is dark &amp; &quot;heavy&quot;.</p><p>Sold in &lt;loaves&gt; of a kilo.</p>"
    "<h1>Oslo</h1><p>Its harbour is frozen for a month.</p></body></html>"
)


def by_tokens(tokenizer, overlap):
    """What TokenTextSplitter does, whose own tokenizers are downloaded: windows of ids, also inside words."""
    windows = Tokenizer(overlap, 12, tokenizer.decode, lambda text: tokenizer(text).input_ids)
    return [Document(text) for text in split_text_on_tokens(text=MARKDOWN, tokenizer=windows)]


def by_meaning(_):
    """LlamaIndex's semantic splitter: sentences, cut where the meaning changes most."""
    text = " ".join(FACTS) + "\n\n" + "  ".join(FACTS[::-2])
    parser = SemanticSplitterNodeParser(
        embed_model=Embedder(asked=[]),
        buffer_size=1,
        breakpoint_percentile_threshold=60,
        sentence_splitter=re.compile(r".+?\.\s*").findall,
    )
    nodes = parser.get_nodes_from_documents([LlamaIndexDocument(text=text)])
    return [Document(node.get_content()) for node in nodes]


SPLITS = {
    "semantic": by_meaning,
    "markdown headers": lambda _: MarkdownHeaderTextSplitter([("#", "h1"), ("##", "h2")]).split_text(
        MARKDOWN
    ),
    "markdown, headers kept": lambda _: MarkdownHeaderTextSplitter(
        [("#", "h1"), ("##", "h2")], strip_headers=False
    ).split_text(MARKDOWN),
    "html headers": lambda _: HTMLHeaderTextSplitter([("h1", "h1"), ("h2", "h2")]).split_text(HTML),
    "tokens": lambda tokenizer: by_tokens(tokenizer, 0),
    "tokens with overlap": lambda tokenizer: by_tokens(tokenizer, 5),
}


@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
def test_other_splitters(split, tiny_tokenizer):
    texts = [document.page_content for document in split(tiny_tokenizer)]
    long = [text for text in texts if len(text.strip()) >= LEAST]
    assert len(long) >= 2
    prompt = f"Context:\n{format_docs(map(Document, texts))}\n\nQuestion?"
    assert [text.strip() for _, text in found(prompt, texts)] == [text.strip() for text in long]


def test_children_that_are_registered_do_not_cut_their_parents():
    parents = RecursiveCharacterTextSplitter(chunk_size=150, chunk_overlap=0).split_text(MARKDOWN)
    child = RecursiveCharacterTextSplitter(chunk_size=40, chunk_overlap=10)
    children = [text for parent in parents for text in child.split_text(parent)]
    prompt = format_docs(map(Document, parents))
    assert [text for _, text in found(prompt, [*children, *parents])] == parents
    assert {text for _, text in found(format_docs(map(Document, children)), [*children, *parents])} >= {
        text for text in children if len(text) >= LEAST and text not in parents
    }
