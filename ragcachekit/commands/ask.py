"""``ragcachekit ask``: questions about a user's own files, answered through both caches."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from ragcachekit.commands import options as opt
from ragcachekit.commands.console import note, pairs, quiet_loading, show
from ragcachekit.commands.workspace import OwnFiles
from ragcachekit.types import DEFAULT_POLICY

if TYPE_CHECKING:
    from rich.table import Table

    from ragcachekit.commands.corpus import Corpus, CorpusChunk
    from ragcachekit.engine.rag_cache import RagCache
    from ragcachekit.reports import Answer
    from ragcachekit.retrieval.cached_retrieval import Retrieved
    from ragcachekit.retrieval.documents import DocumentIndex
    from ragcachekit.retrieval.saved import ResultId

CAPACITY = 1000
"""Entries of the query cache."""


def ask(
    corpus: opt.CorpusDir,
    questions: Annotated[
        list[str] | None, typer.Argument(help="Without any, one per line of the input.")
    ] = None,
    model: opt.Model = "",
    policy: opt.Policy = DEFAULT_POLICY,
    encoder: opt.Encoder = None,
    k: opt.K = 4,
    tolerance: opt.Tolerance = 0.0,
    cache: opt.CacheDir = None,
    namespace: opt.Namespace = "default",
    chunk_tokens: opt.ChunkTokens = 200,
    max_new_tokens: opt.MaxNewTokens = 128,
    device: opt.Device = None,
    dtype: opt.Dtype = "auto",
    disk_gb: opt.DiskGb = None,
) -> None:
    """Answer questions about your own files with your own model, and show what was reused.

    Embeddings and chunk KV stay in the cache folder: the next question starts where this one ended.
    """
    settings = opt.settings_of(OwnFiles, locals())
    quiet_loading()
    with open_session(settings) as session:
        for question in questions or _typed():
            if len(questions or ()) > 1:
                typer.secho(f"\n{question}", bold=True)
            reply = session.ask(question, lambda text: typer.echo(text, nl=False))
            typer.echo()
            show(_about(reply, session.keep()))


class Reply(NamedTuple):
    """One answer, the chunks of its prompt and how they were found; ``retrieval_ms`` includes embedding."""

    answer: Answer
    found: Retrieved[CorpusChunk]
    retrieval_ms: float


class CorpusSearch:
    """Search of a corpus through a query cache, over the stored index, which is brought up to date."""

    def __init__(self, settings: OwnFiles, corpus: Corpus) -> None:
        from ragcachekit.commands.embedding import MiniLM
        from ragcachekit.retrieval.cached_retrieval import CachedRetrieval
        from ragcachekit.retrieval.proximity import ProximityCache

        self._chunks, self._k, self._embedder = corpus.by_id, settings.k, MiniLM()
        self._cache = CachedRetrieval["CorpusChunk"](ProximityCache(CAPACITY, settings.tolerance))
        self._index = corpus_index(settings, corpus, self._embedder)

    def __call__(self, question: str) -> Retrieved[CorpusChunk]:
        """Chunks of a near enough earlier question, else of a search."""
        vector = self._embedder.embed([question])[0]

        def search() -> list[tuple[ResultId, CorpusChunk]]:
            found = [hit.record.id for hit in self._index.search(vector, self._k)]
            return [(id, self._chunks[str(id)]) for id in found]

        return self._cache.get(vector, "corpus", search)


class AskSession:
    """Answers several questions; made by :func:`open_session`."""

    def __init__(self, rag: RagCache, search: CorpusSearch, max_new_tokens: int) -> None:
        from ragcachekit.commands.questions import PromptMaker

        self.rag, self._search, self._prompt = rag, search, PromptMaker(rag.tokenizer)
        self._options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": False}

    def ask(self, question: str, on_text: Callable[[str], object] = lambda _: None) -> Reply:
        """Answer a question; ``on_text`` is called with every piece of the answer. Missed KV is stored."""
        if not question.strip():
            raise ValueError("the question is empty")
        start = time.perf_counter()
        found = self._search(question)
        retrieval_ms = (time.perf_counter() - start) * 1e3
        texts = [chunk.text for chunk in found.documents]
        self.rag.register(texts)
        self.rag.prefetch(texts)
        prompt = self._prompt.filled("\n\n".join(texts), question)
        with self.rag.stream(prompt, stop=list(self._prompt.stop) or None, **self._options) as pieces:
            for piece in pieces:
                on_text(piece)
            return Reply(pieces.answer, found, retrieval_ms)

    def keep(self) -> tuple[str, ...]:
        """Wait until missed KV is stored; returns the names of the tiers that refused some."""
        self.rag.flush()
        return tuple(record.tier for record in self.rag.stats() if record.failed_writes)


@contextmanager
def open_session(settings: OwnFiles) -> Iterator[AskSession]:
    """Read the corpus, embed what is new in it, load the model.

    Raises CorpusError, RetrievalError, RagCacheError, ModelNotSupported, StoreError.
    """
    from ragcachekit.config import StoreConfig

    corpus = settings.read_corpus()
    for skipped in corpus.notes:
        note(skipped)
    store = StoreConfig(disk_path=settings.folder.kv, disk_bytes=settings.disk_bytes)
    with settings.open_engine(store, corpus) as rag:  # first: a model that is refused costs no embedding
        yield AskSession(rag, CorpusSearch(settings, corpus), settings.max_new_tokens)


def corpus_index(settings: OwnFiles, corpus: Corpus, embedder: Any) -> DocumentIndex:
    """Vector index of a corpus, stored in the cache folder; only new chunks are embedded."""
    from ragcachekit.errors import RetrievalError
    from ragcachekit.retrieval.documents import DocumentIndex

    folder = os.fsencode(Path(settings.corpus).expanduser().resolve())
    path = settings.folder.indexes / f"minilm-{hashlib.sha256(folder).hexdigest()[:16]}"
    try:
        index = DocumentIndex(path=path)
    except RetrievalError as error:
        note(f"the stored index is rebuilt: {error}")
        shutil.rmtree(path)
        index = DocumentIndex(path=path)
    held = frozenset(index.ids)
    index.delete([id for id in held if id not in corpus.by_id])
    new = {id: chunk.text for id, chunk in corpus.by_id.items() if id not in held}
    if new:
        note(f"embedding {len(new)} of {len(corpus.by_id)} chunks")
        texts = list(new.values())
        index.add(list(new), embedder.embed(texts, progress=len(new) > 100), texts)
    return index


def _typed() -> Iterator[str]:
    if sys.stdin.isatty():
        note("one question per line; Ctrl-D ends")
    yield from filter(None, map(str.strip, sys.stdin))


def _about(reply: Reply, refused: Sequence[str]) -> Table:
    report, found = reply.answer.report, reply.found
    link, reused = report.link, report.link.reused_tokens
    tiers = {use.source for use in link.uses if use.source != "computed"}
    how = f"hit at distance {found.distance:.3f}" if found.hit else "miss, index searched"
    rows = {
        "sources": ", ".join(f"{chunk.source}#{chunk.number}" for chunk in found.documents),
        "retrieval": f"query cache {how}, {reply.retrieval_ms:.0f} ms",
        "prompt": f"{link.prompt_tokens} tokens: {reused} reused"
        + (f" from {' and '.join(sorted(tiers))} ({link.exact_tokens} exactly)" if reused else "")
        + f", {link.recomputed_tokens} recomputed, {link.computed_tokens} computed",
        "answer": f"first token after {report.ttft_ms:.0f} ms, "
        f"{report.output_tokens} tokens in {report.total_ms:.0f} ms",
        "fell back": link.fallback or "",
        "notes": "; ".join(link.notes),
    }
    if refused:
        rows["not kept"] = f"all of it by {' and '.join(refused)}: too small (--disk-gb), full or failing"
    return pairs(rows)
