"""What retrieval takes with and without the query cache, embedding apart."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from langchain_core.retrievers import BaseRetriever

from benchmarks.demo.chain import Wording, has_evidence, places
from benchmarks.demo.store import SEARCH, ArticleStore
from langchain_ragcachekit import RagCacheRetriever


@dataclass(frozen=True)
class _Retrieval:
    ms: float
    search: int
    complete: bool


def latencies(
    store: ArticleStore, wordings: Sequence[Wording], tolerance: float, k: int, embed_ms: float
) -> list[dict[str, Any]]:
    """Retrieval alone, both ways in turn on every question; the store knows the questions' vectors.

    Returns
    -------
    list of dict
        Rows ``part, query_cache, evidence_recall, retrieval_ms, hit_ms, miss_ms, embed_ms, total_ms,
        n``: medians in milliseconds, ``total_ms`` with the embedding of the question.
    """
    plain = store.as_retriever(search_kwargs={"k": k})
    cached = RagCacheRetriever.wrap(plain, embeddings=store.embeddings, tolerance=tolerance)
    pairs = [(_timed(plain, wording), _timed(cached, wording)) for wording in wordings]
    off, on = ([pair[side] for pair in pairs] for side in (0, 1))
    seen: set[int] = set()
    hits, misses = list[_Retrieval](), list[_Retrieval]()
    for one in on:
        (hits if one.search in seen else misses).append(one)
        seen.add(one.search)
    return [_row("off", off, [], off, embed_ms), _row("on", on, hits, misses, embed_ms)]


def _timed(retriever: BaseRetriever, wording: Wording) -> _Retrieval:
    begun = time.perf_counter()
    found = retriever.invoke(wording.text)
    spent = (time.perf_counter() - begun) * 1e3
    return _Retrieval(spent, found[0].metadata[SEARCH], has_evidence(wording.question, places(found)))


def _row(
    name: str,
    everything: Sequence[_Retrieval],
    hits: Sequence[_Retrieval],
    misses: Sequence[_Retrieval],
    embed_ms: float,
) -> dict[str, Any]:
    middle = median(one.ms for one in everything)
    return {
        "part": "retrieval",
        "query_cache": name,
        "evidence_recall": fmean(one.complete for one in everything),
        "retrieval_ms": middle,
        "hit_ms": median(one.ms for one in hits) if hits else None,
        "miss_ms": median(one.ms for one in misses) if misses else None,
        "embed_ms": embed_ms,
        "total_ms": embed_ms + middle,
        "n": len(everything),
    }
