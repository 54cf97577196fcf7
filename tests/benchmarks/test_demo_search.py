"""The demo's retrieval and chain, with a handful of chunks and embeddings that count words."""

import re
import zlib

import numpy as np
from langchain_core.embeddings import Embeddings
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage

from benchmarks.demo.chain import ask, build_chain, messages
from benchmarks.demo.corpus import CHUNK, SEARCH, ManualRetriever, manual_index
from langchain_ragcachekit import RagCacheRetriever

TEXTS = tuple(
    f"{topic}\nThis page is about the {topic}." for topic in ("csv file", "thread pool", "date time")
)


class CountedWords(Embeddings):
    """Hashed counts of words; ``embedded`` texts so far."""

    embedded = 0

    def embed(self, texts, *, progress=False):
        self.embedded += len(texts)
        rows = np.full((len(texts), 64), 0.01, np.float32)
        for row, text in zip(rows, texts, strict=True):
            for word in re.findall(r"\w+", text.lower()):
                row[zlib.crc32(word.encode()) % 64] += 1
        return rows / np.linalg.norm(rows, axis=1, keepdims=True)

    def embed_documents(self, texts):
        return self.embed(texts).tolist()

    def embed_query(self, text):
        return self.embed([text])[0].tolist()


def retriever(vectors=0, k=2):
    embeddings = CountedWords()
    index = manual_index(embeddings.embed(TEXTS), vectors, seed=0)
    return ManualRetriever(embeddings=embeddings, index=index, texts=TEXTS, k=k)


def test_the_nearest_chunks_come_first_and_searches_are_numbered():
    found = retriever()
    first, second = found.invoke("the thread pool"), found.invoke("a csv file")
    assert [document.page_content for document in (first[0], second[0])] == [TEXTS[1], TEXTS[0]]
    assert [document.metadata for document in first] == [
        {CHUNK: int(document.id), SEARCH: 0} for document in first
    ]
    assert {document.metadata[SEARCH] for document in second} == {1}
    assert len(first) == 2


def test_the_chain_sends_these_messages_and_shows_what_it_retrieved():
    plain = retriever()
    cached = RagCacheRetriever.wrap(plain, embeddings=plain.embeddings)
    report = {"ragcachekit": {"link": {}}}
    chat = GenericFakeChatModel(
        messages=iter(AIMessage(content="so", response_metadata=report) for _ in range(2))
    )
    first, second = (ask(build_chain(cached, chat), "the thread pool") for _ in range(2))
    assert first.answer == "so"
    assert first.chunks == second.chunks
    assert first.chunks[0] == 1
    assert list(first.messages) == messages([TEXTS[place] for place in first.chunks], "the thread pool")
    assert first.messages[1] == {"role": "user", "content": "the thread pool"}
    assert first.report == {"link": {}}
