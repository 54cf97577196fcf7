"""What every logged question finds: what its line names, or a search with a query cache in front."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from langchain_core.embeddings import Embeddings
from langchain_core.retrievers import BaseRetriever
from numpy.typing import NDArray

from ragcachekit.bench.ask import CAPACITY
from ragcachekit.bench.corpus import Corpus
from ragcachekit.bench.estimate_log import LoggedQuery
from ragcachekit.query.proximity import ProximityCache
from ragcachekit.query.retrieval import CachedRetrieval

TOLERANCES = (0.0, 0.02, 0.05, 0.1)
"""Cosine distances at which repeats are counted."""

_NAME = re.compile(r"\S+#\d+")


@dataclass(frozen=True)
class Retrievals:
    """What every logged question finds.

    Attributes
    ----------
    texts : tuple of tuple of str
        Per question, in the order of the prompt.
    same : int
        Questions that were asked before, letter for letter.
    near : dict of float to int
        Per tolerance, questions that the query cache would have answered.
    """

    texts: tuple[tuple[str, ...], ...]
    same: int
    near: dict[float, int]


def retrieve(
    log: Sequence[LoggedQuery],
    corpus: Corpus,
    vectors: NDArray[Any],
    search: Callable[[str], tuple[str, ...]] | None,
    tolerance: float,
) -> Retrievals:
    """Go through the log with a query cache in front of ``search``; what a line names counts instead.

    ``vectors`` are the questions' embeddings, in the order of the log; without ``search`` every line
    must name what it found.

    Raises
    ------
    ValueError
        For a ``file#number`` that the corpus does not have.
    """
    names = {f"{chunk.source}#{chunk.number}": chunk.text for chunk in corpus.chunks}
    caches = {t: CachedRetrieval[str](ProximityCache(CAPACITY, t)) for t in {*TOLERANCES, tolerance}}
    texts = []
    for query, vector in zip(log, vectors, strict=True):
        found = tuple(_text(query, doc, names) for doc in query.docs) if query.docs is not None else None

        def look(query: LoggedQuery = query, found: tuple[str, ...] | None = found) -> list[tuple[str, str]]:
            if found is not None or search is None:
                return [(text, text) for text in found or ()]
            return [(text, text) for text in search(query.query)]

        results = {t: cache.get(vector, "estimate", look) for t, cache in caches.items()}
        texts.append(results[tolerance].documents if found is None else found)
    near = {t: caches[t].stats().hits for t in sorted(caches)}
    return Retrievals(tuple(texts), len(log) - len({q.query for q in log}), near)


def _text(query: LoggedQuery, doc: str, names: dict[str, str]) -> str:
    if doc in names:
        return names[doc]
    if _NAME.fullmatch(doc):
        raise ValueError(
            f"line {query.line} of the log: the corpus has no chunk {doc}; numbers count a file's chunks "
            "from 0, as `ask` names its sources, and depend on --chunk-tokens"
        )
    return doc


class KnownVectors(Embeddings):
    """Embeddings of texts that were embedded before, all at once."""

    def __init__(self, vectors: dict[str, NDArray[Any]]) -> None:
        self._vectors = vectors

    def embed(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        """Rows, in order."""
        return [self._vectors[text] for text in texts]

    def embed_query(self, text: str) -> list[float]:
        """One text."""
        row: list[float] = self._vectors[text].tolist()
        return row

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """Several."""
        return [self.embed_query(text) for text in texts]


def search_of(retriever: BaseRetriever) -> Callable[[str], tuple[str, ...]]:
    """A retriever as a function from a question to texts, each question searched once."""
    known: dict[str, tuple[str, ...]] = {}

    def search(query: str) -> tuple[str, ...]:
        if query not in known:
            known[query] = tuple(document.page_content for document in retriever.invoke(query))
        return known[query]

    return search
