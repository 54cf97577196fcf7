"""What every logged question finds: what its line names, or a search with a query cache in front."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from numpy.typing import NDArray

from ragcachekit.commands.ask import CAPACITY
from ragcachekit.commands.corpus import Corpus
from ragcachekit.commands.estimate.log import LoggedQuery
from ragcachekit.query.proximity import ProximityCache
from ragcachekit.query.retrieval import CachedRetrieval

TOLERANCES = (0.0, 0.02, 0.05, 0.1)
"""Cosine distances at which repeats are counted."""

_NAME = re.compile(r"\S+#\d+")

Search = Callable[[NDArray[Any]], tuple[str, ...]]
"""From a question's embedding to the texts that are nearest to it."""


@dataclass(frozen=True)
class Retrievals:
    """What every logged question finds: its texts, in the order of the prompt.

    ``same`` questions were asked before, letter for letter; ``near`` are, per tolerance, those that the
    query cache would have answered.
    """

    texts: tuple[tuple[str, ...], ...]
    same: int
    near: dict[float, int]


def retrieve(
    log: Sequence[LoggedQuery], corpus: Corpus, vectors: NDArray[Any], search: Search, tolerance: float
) -> Retrievals:
    """Go through the log with a query cache in front of ``search``; what a line names counts instead.

    ``vectors`` are the questions' embeddings, in the order of the log.

    Raises ValueError for a ``file#number`` that the corpus does not have.
    """
    names = {f"{chunk.source}#{chunk.number}": chunk.text for chunk in corpus.chunks}
    caches = {t: CachedRetrieval[str](ProximityCache(CAPACITY, t)) for t in {*TOLERANCES, tolerance}}
    texts: list[tuple[str, ...]] = []
    known: dict[str, tuple[str, ...]] = {}
    for query, vector in zip(log, vectors, strict=True):
        if query.docs is not None:
            found = tuple(_text(query, doc, names) for doc in query.docs)
        else:
            if query.query not in known:
                known[query.query] = search(vector)
            found = known[query.query]
        results = {t: cache.get(vector, "estimate", partial(_pairs, found)) for t, cache in caches.items()}
        texts.append(results[tolerance].documents if query.docs is None else found)
    near = {t: caches[t].stats().hits for t in sorted(caches)}
    return Retrievals(tuple(texts), len(log) - len({q.query for q in log}), near)


def _pairs(found: Sequence[str]) -> list[tuple[str, str]]:
    return [(text, text) for text in found]


def _text(query: LoggedQuery, doc: str, names: dict[str, str]) -> str:
    if doc in names:
        return names[doc]
    if _NAME.fullmatch(doc):
        raise ValueError(
            f"line {query.line} of the log: the corpus has no chunk {doc}; numbers count a file's chunks "
            "from 0, as `ask` names its sources, and depend on --chunk-tokens"
        )
    return doc
