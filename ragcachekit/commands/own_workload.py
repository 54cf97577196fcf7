"""Workload of the query-cache bench from a user's log and corpus."""

from __future__ import annotations

import os

from ragcachekit.commands.bench.query_cache import Workload
from ragcachekit.commands.corpus import read_corpus
from ragcachekit.commands.embedding import MiniLM
from ragcachekit.commands.estimate.log import read_log


def workload(
    log: str | os.PathLike[str], corpus: str | os.PathLike[str], chunk_tokens: int, progress: bool = False
) -> Workload:
    """Embed the questions of a log, in order, and the chunks of a corpus.

    Raises ValueError, CorpusError, RagCacheError, RetrievalError if either or the embedding model is missing.
    """
    asked = [query.query for query in read_log(log)]
    chunks = read_corpus(corpus, chunk_tokens=chunk_tokens, tokenizer=None).texts
    embedder = MiniLM()
    questions = embedder.embed(asked, progress=progress)
    name = f"{log} over {corpus}; all-MiniLM-L6-v2"
    return Workload(name, questions, embedder.embed(chunks, progress=progress), len(set(asked)))
