"""Chunks of LangChain's splitters and LlamaIndex's semantic one: each found once, at its own edges."""

from hypothesis import given, settings
from hypothesis import strategies as st
from langchain_core.documents import Document
from langchain_text_splitters import RecursiveCharacterTextSplitter

from langchain_ragcachekit import format_docs
from ragcachekit.prompt.segments import ChunkRegistry, segment_text
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


@settings(max_examples=60, deadline=None)
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
