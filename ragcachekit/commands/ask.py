"""Questions about a user's own files, answered through both caches, and what they saved."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ragcachekit.commands.corpus import Corpus, CorpusChunk
from ragcachekit.commands.embedding import DIM, MiniLM
from ragcachekit.commands.own_files import OwnFiles, at_least_1
from ragcachekit.commands.reading_prompt import PLAIN_STOP, SEPARATOR, prompt_for
from ragcachekit.config import StoreConfig
from ragcachekit.engine.rag_cache import RagCache
from ragcachekit.errors import RetrievalError
from ragcachekit.files import make_folder
from ragcachekit.retrieval.cached_retrieval import CachedRetrieval, Retrieved
from ragcachekit.retrieval.index import VectorIndex, load_index, open_index
from ragcachekit.retrieval.index_files import read_index
from ragcachekit.retrieval.proximity import ProximityCache, ResultId

Say = Callable[[str], object]
CAPACITY = 1000
"""Entries of the query cache."""


@dataclass(frozen=True)
class AskSettings(OwnFiles):
    """What ``ragcachekit ask`` takes: ``k`` chunks per prompt, ``tolerance`` of the query cache."""

    k: int = 4
    tolerance: float = 0.0
    max_new_tokens: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        ProximityCache(CAPACITY, self.tolerance)
        at_least_1(self, "k", "max_new_tokens")


@dataclass(frozen=True)
class Asked:
    """One answer and how it came about.

    ``sources`` are ``file#number`` of the prompt's chunks, in order; ``hit`` is that of the query cache,
    ``distance`` that of its nearest question; ``retrieval_ms`` includes embedding; ``report`` is
    :class:`~ragcachekit.GenerateReport` as plain data.
    """

    text: str
    sources: tuple[str, ...]
    hit: bool
    distance: float | None
    retrieval_ms: float
    report: dict[str, Any]


class CorpusSearch:
    """Search of a corpus behind a query cache, over the stored index, which is brought up to date."""

    def __init__(self, settings: AskSettings, corpus: Corpus, say: Say) -> None:
        self._chunks, self._k, self._embedder = corpus.by_id, settings.k, MiniLM()
        self._index = corpus_index(settings, corpus, self._embedder, say)
        self._cache = CachedRetrieval[CorpusChunk](ProximityCache(CAPACITY, settings.tolerance))

    def __call__(self, question: str) -> Retrieved[CorpusChunk]:
        """Chunks of a near enough earlier question, else of a search."""
        vector = self._embedder.embed([question])[0]

        def search() -> list[tuple[ResultId, CorpusChunk]]:
            return [(id, self._chunks[str(id)]) for id in self._index.search(vector, self._k).ids]

        return self._cache.get(vector, "corpus", search)


class AskSession:
    """Answers several questions; made by :func:`open_session`."""

    def __init__(self, rag: RagCache, search: CorpusSearch, max_new_tokens: int) -> None:
        self.rag, self._search, self._prompt = rag, search, prompt_for(rag.tokenizer)
        self._options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": False}

    def ask(self, question: str, on_text: Say = lambda _: None) -> Asked:
        """Answer a question; ``on_text`` is called with every piece of the answer. Missed KV is stored."""
        if not question.strip():
            raise ValueError("the question is empty")
        begun = time.perf_counter()
        found = self._search(question)
        retrieval_ms = (time.perf_counter() - begun) * 1e3
        texts = [chunk.text for chunk in found.documents]
        self.rag.register(texts)
        self.rag.prefetch(texts)
        prompt = self._prompt.filled(SEPARATOR.join(texts), question)
        stop = None if self._prompt.chat else PLAIN_STOP
        with self.rag.stream(prompt, stop=stop, **self._options) as pieces:
            for piece in pieces:
                on_text(piece)
            answer = pieces.answer
        sources = tuple(f"{chunk.source}#{chunk.number}" for chunk in found.documents)
        return Asked(answer.text, sources, found.hit, found.distance, retrieval_ms, answer.report.to_dict())

    def keep(self) -> tuple[str, ...]:
        """Wait until missed KV is stored; returns the names of the tiers that refused some."""
        self.rag.flush()
        return tuple(record.tier for record in self.rag.stats() if record.failed_writes)


@contextmanager
def open_session(settings: AskSettings, say: Say = lambda _: None) -> Iterator[AskSession]:
    """Read the corpus, embed what is new in it, load the model.

    Raises CorpusError, RetrievalError, RagCacheError, ModelNotSupported, StoreError.
    """
    corpus = settings.checked_corpus()
    for note in corpus.notes:
        say(note)
    store = StoreConfig(disk_path=settings.folder.kv, disk_bytes=settings.disk_bytes)
    with settings.open_engine(store, corpus) as rag:  # first: a model that is refused costs no embedding
        yield AskSession(rag, CorpusSearch(settings, corpus, say), settings.max_new_tokens)


def corpus_index(settings: OwnFiles, corpus: Corpus, embedder: MiniLM, say: Say) -> VectorIndex:
    """Vector index of a corpus, stored in the cache folder; only new chunks are embedded."""
    folder = os.fsencode(Path(settings.corpus).expanduser().resolve())
    path = settings.folder.indexes / f"minilm-{hashlib.sha256(folder).hexdigest()[:16]}.index"
    index, held = _stored_index(path, say)
    gone = [id for id in held if id not in corpus.by_id]
    new = [chunk for id, chunk in corpus.by_id.items() if id not in held]
    if gone:
        index.remove(gone)
    if new:
        say(f"embedding {len(new)} of {len(corpus.by_id)} chunks")
        index.add([chunk.id for chunk in new], embedder.embed([c.text for c in new], progress=len(new) > 100))
    if gone or new:
        make_folder(path.parent)
        index.save(path)
    return index


def _stored_index(path: Path, say: Say) -> tuple[VectorIndex, frozenset[str]]:
    if path.exists():
        try:
            return load_index(path), frozenset(str(id) for _, id in read_index(path)[0].ids)
        except RetrievalError as error:
            say(f"the stored index is built anew: {error}")
    return open_index("faiss-flat", DIM), frozenset()
