"""Questions about a user's own files: a LangChain chain with both caches, and what they saved."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from langchain_core.callbacks import BaseCallbackHandler, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.outputs import LLMResult
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnablePassthrough

from langchain_ragcachekit import ChatRagCache, RagCacheLLM, RagCacheRetriever
from langchain_ragcachekit.retriever import HIT_EVENT, MISS_EVENT
from ragcachekit.commands.checks import check_writable
from ragcachekit.commands.corpus import Corpus
from ragcachekit.commands.embedding import DIM, MiniLM, model_folder
from ragcachekit.commands.own_files import OwnFiles, at_least_1
from ragcachekit.commands.reading_prompt import PLAIN_STOP, SEPARATOR, prompt_for
from ragcachekit.config import StoreConfig
from ragcachekit.engine.rag_cache import RagCache
from ragcachekit.errors import RetrievalError
from ragcachekit.query.proximity import ProximityCache
from ragcachekit.search.base import VectorIndex
from ragcachekit.search.manifest import read_index
from ragcachekit.search.registry import load_index, open_index

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

    ``sources`` are ``file#number`` of the prompt's chunks, in order; ``hit`` is that of the query cache
    (None: not asked), ``distance`` that of its nearest question; ``retrieval_ms`` includes embedding;
    ``report`` is :class:`~ragcachekit.GenerateReport` as plain data.
    """

    text: str
    sources: tuple[str, ...]
    hit: bool | None
    distance: float | None
    retrieval_ms: float
    report: dict[str, Any]


class AskSession:
    """A chain for several questions; made by :func:`open_session`."""

    def __init__(self, rag: RagCache, retriever: RagCacheRetriever, max_new_tokens: int) -> None:
        self.rag = rag
        prompt = prompt_for(rag.tokenizer)
        model: Any = ChatRagCache(cache=rag, max_tokens=max_new_tokens)
        if not prompt.chat:
            model = RagCacheLLM(cache=rag, max_tokens=max_new_tokens, stop=list(PLAIN_STOP))
        inputs = {"context": retriever | _joined, "input": RunnablePassthrough()}
        self._chain = inputs | prompt.template | model

    def ask(self, question: str, on_text: Say = lambda _: None) -> Asked:
        """Answer a question; ``on_text`` is called with every piece of the answer. Missed KV is stored."""
        if not question.strip():
            raise ValueError("the question is empty")
        trace, parts = _Trace(), list[str]()
        for piece in self._chain.stream(question, config={"callbacks": [trace]}):
            parts.append(piece if isinstance(piece, str) else str(piece.content))
            on_text(parts[-1])
        return trace.asked("".join(parts))

    def keep(self) -> tuple[str, ...]:
        """Wait until missed KV is stored; returns the names of the tiers that refused some."""
        self.rag.flush()
        return tuple(record.tier for record in self.rag.stats() if record.failed_writes)


@contextmanager
def open_session(settings: AskSettings, say: Say = lambda _: None) -> Iterator[AskSession]:
    """Read the corpus, embed what is new in it, load the model, join them into a chain.

    Raises CorpusError, RetrievalError, RagCacheError, ModelNotSupported, StoreError.
    """
    model_folder()
    folder = settings.folder
    check_writable(folder.path)
    corpus = settings.read_corpus()
    for note in corpus.notes:
        say(note)
    store = StoreConfig(disk_path=folder.kv, disk_bytes=settings.disk_bytes)
    with settings.open_engine(store, corpus) as rag:  # first: a model that is refused costs no embedding
        yield AskSession(rag, own_retriever(settings, corpus, say, rag), settings.max_new_tokens)


def own_retriever(
    settings: AskSettings, corpus: Corpus, say: Say, rag: RagCache | None = None
) -> RagCacheRetriever:
    """Search of a corpus by MiniLM, behind a query cache."""
    embedder = MiniLM()
    index = corpus_index(corpus, Path(settings.corpus), embedder, settings.folder.indexes, say)
    inner = IndexRetriever(index=index, corpus=corpus, embedder=embedder, k=settings.k)
    return RagCacheRetriever.wrap(
        inner, embeddings=embedder, cache=rag, tolerance=settings.tolerance, capacity=CAPACITY
    )


def corpus_index(corpus: Corpus, folder: Path, embedder: MiniLM, place: Path, say: Say) -> VectorIndex:
    """Vector index of a corpus, stored in the folder ``place``; only new chunks are embedded."""
    name = hashlib.sha256(os.fsencode(folder.expanduser().resolve())).hexdigest()[:16]
    path = place / f"minilm-{name}.index"
    index, held = _stored_index(path, say)
    gone = [id for id in held if id not in corpus.by_id]
    new = [chunk for id, chunk in corpus.by_id.items() if id not in held]
    if gone:
        index.remove(gone)
    if new:
        say(f"embedding {len(new)} of {len(corpus.by_id)} chunks")
        index.add([chunk.id for chunk in new], embedder.embed([c.text for c in new], progress=len(new) > 100))
    if gone or new:
        place.mkdir(parents=True, exist_ok=True)
        index.save(path)
    return index


def _stored_index(path: Path, say: Say) -> tuple[VectorIndex, frozenset[str]]:
    if path.exists():
        try:
            return load_index(path), frozenset(str(id) for _, id in read_index(path)[0].ids)
        except RetrievalError as error:
            say(f"the stored index is built anew: {error}")
    return open_index("faiss-flat", DIM), frozenset()


class IndexRetriever(BaseRetriever):
    """Retriever of the chunks of a corpus nearest to a question."""

    index: Any
    corpus: Any
    embedder: Any
    k: int

    def cache_key_parts(self) -> int:
        """Part of the query cache's key; index and corpus do not change."""
        return self.k

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun
    ) -> list[Document]:
        found = self.index.search(self.embedder.embed([query])[0], self.k)
        chunks = [self.corpus.by_id[id] for id in found.ids]
        return [Document(c.text, id=c.id, metadata={"source": f"{c.source}#{c.number}"}) for c in chunks]


def _joined(documents: list[Document]) -> str:
    return SEPARATOR.join(document.page_content for document in documents)


@dataclass(eq=False)
class _Trace(BaseCallbackHandler):
    """Callbacks of one run of the chain."""

    hit: bool | None = None
    distance: float | None = None
    retrieval_ms: float = 0.0
    sources: tuple[str, ...] = ()
    report: dict[str, Any] = field(default_factory=dict)
    _begun: float = 0.0

    def asked(self, text: str) -> Asked:
        return Asked(text, self.sources, self.hit, self.distance, self.retrieval_ms, self.report)

    def on_retriever_start(self, *args: Any, **kwargs: Any) -> None:
        self._begun = self._begun or time.perf_counter()

    def on_retriever_end(self, documents: Any, **kwargs: Any) -> None:  # the wrapper's comes last
        self.retrieval_ms = (time.perf_counter() - self._begun) * 1e3
        self.sources = tuple(document.metadata["source"] for document in documents)

    def on_custom_event(self, name: str, data: Any, **kwargs: Any) -> None:
        if name in (HIT_EVENT, MISS_EVENT):
            self.hit, self.distance = name == HIT_EVENT, data["distance"]

    def on_llm_end(self, response: LLMResult, **kwargs: Any) -> None:
        generation: Any = response.generations[0][0]
        message = getattr(generation, "message", None)
        about = message.response_metadata if message else generation.generation_info
        self.report = about["ragcachekit"]
