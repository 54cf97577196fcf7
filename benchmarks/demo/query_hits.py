"""All wordings through the query cache: which searches it saved, and which hits were wrong."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

import numpy as np
from langchain_core.retrievers import BaseRetriever
from tqdm.auto import tqdm

from benchmarks.demo.corpus import CHUNK, SEARCH, RememberedEmbeddings
from ragcachekit.retrieval.proximity import ProximityCache

PART, SWEEP = "query cache", "tolerance"
TOLERANCES = (0.02, 0.1, 0.15, 0.2, 0.3, 0.4)


@dataclass(frozen=True)
class Lookup:
    """One wording: its question's place, the question whose search was used, and chunks and milliseconds.

    ``maker`` is None on a miss. ``plain`` and ``plain_ms`` are of a search without the cache.
    """

    question: int
    maker: int | None
    chunks: tuple[int, ...]
    plain: tuple[int, ...]
    ms: float
    plain_ms: float


def replay(
    plain: BaseRetriever, cached: BaseRetriever, wordings: Sequence[tuple[int, str]], progress: bool
) -> list[Lookup]:
    """Ask both retrievers every wording in turn; the embeddings of all are known, so none is timed."""
    makers: dict[int, int] = {}
    out = []
    for place, text in tqdm(wordings, "query cache", unit="question", disable=not progress):
        plain_ms, usual = _timed(plain, text)
        ms, found = _timed(cached, text)
        search = found[0].metadata[SEARCH]
        maker = makers.get(search)
        makers.setdefault(search, place)
        out.append(Lookup(place, maker, _chunks(found), _chunks(usual), ms, plain_ms))
    return out


def counts(lookups: Sequence[Lookup], evidence: Sequence[frozenset[int]]) -> dict[str, int]:
    """``n``, ``hits``, ``right``, ``wrong`` and ``harmful``.

    A right hit is on an entry that a wording of the same question made. A harmful one, right or wrong, lacks
    the chunk with the answer although a search finds it.
    """
    hits = [one for one in lookups if one.maker is not None]
    right = sum(one.maker == one.question for one in hits)
    harmful = sum(
        bool(evidence[one.question] & {*one.plain}) and not evidence[one.question] & {*one.chunks}
        for one in hits
    )
    return {
        "n": len(lookups), "hits": len(hits), "right": right, "wrong": len(hits) - right, "harmful": harmful
    }  # fmt: skip


def row(lookups: Sequence[Lookup], evidence: Sequence[frozenset[int]], **more: Any) -> dict[str, Any]:
    """The figures of one replay; milliseconds are medians, ``saved_ms`` is the sum over all hits."""
    hit = [one.ms for one in lookups if one.maker is not None]
    miss = [one.ms for one in lookups if one.maker is None]
    search_ms = median(one.plain_ms for one in lookups)
    return {
        "part": PART,
        **counts(lookups, evidence),
        "recall": fmean(bool(evidence[one.question] & {*one.plain}) for one in lookups),
        "cached_recall": fmean(bool(evidence[one.question] & {*one.chunks}) for one in lookups),
        "search_ms": search_ms,
        "hit_ms": median(hit) if hit else None,
        "miss_ms": median(miss) if miss else None,
        "saved_ms": sum(one.plain_ms - one.ms for one in lookups if one.maker is not None),
        **more,
    }


def sweep(
    lookups: Sequence[Lookup],
    wordings: Sequence[tuple[int, str]],
    known: RememberedEmbeddings,
    evidence: Sequence[frozenset[int]],
) -> Iterator[dict[str, Any]]:
    """Rows of :func:`counts` at other tolerances: the same wordings, by the library's cache, not timed."""
    rows = [np.asarray(known.embed_query(text), np.float32) for _, text in wordings]
    for tolerance in TOLERANCES:
        cache = ProximityCache(len(wordings), tolerance, "cosine")
        out = list[Lookup]()
        for one, embedding in zip(lookups, rows, strict=True):
            hit = cache.lookup(embedding, partition="")
            if hit is None:
                cache.insert(embedding, (len(out),), partition="")
            maker = out[int(hit.results[0])] if hit is not None else None
            if maker is None:
                out.append(replace(one, maker=None, chunks=one.plain))
            else:
                out.append(replace(one, maker=maker.question, chunks=maker.plain))
        yield {"part": SWEEP, "tolerance": tolerance, **counts(out, evidence)}


def _timed(retriever: BaseRetriever, text: str) -> tuple[float, list[Any]]:
    start = time.perf_counter()
    found = retriever.invoke(text)
    return (time.perf_counter() - start) * 1e3, found


def _chunks(documents: Sequence[Any]) -> tuple[int, ...]:
    return tuple(document.metadata[CHUNK] for document in documents)
