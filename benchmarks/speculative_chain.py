"""``python -m benchmarks speculation --chain``: questions through LangChain, over our own graph index."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from langchain_core.embeddings import Embeddings
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnablePassthrough
from tqdm.auto import tqdm

from benchmarks.query_cache.workload import Workload
from langchain_ragcachekit import (
    ChatRagCache,
    RagCacheRetriever,
    RagCacheVectorStore,
    SpeculativeRag,
    format_docs,
)
from ragcachekit import RagCache
from ragcachekit.errors import RagCacheError

PLAIN, SPECULATIVE = WAYS = ("chain", "SpeculativeRag")
PROMPT = ChatPromptTemplate.from_template("{context}\n\nQuestion: {question}\nAnswer:")
LINKS, EF_CONSTRUCTION = 16, 40  # of a graph that is built in a minute


class Known(Embeddings):
    """The embeddings of a workload's questions."""

    def __init__(self, workload: Workload) -> None:
        rows: list[list[float]] = workload.questions.tolist()
        self._rows = dict(zip(workload.texts, rows, strict=True))

    def embed_query(self, text: str) -> list[float]:
        return self._rows[text]

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        raise NotImplementedError("the vectors are added with the documents")


@dataclass(frozen=True)
class Timing:
    """One streamed answer; ``ttft`` and ``prefill`` in ms, the latter from its submission on."""

    ttft: float
    prefill: float
    text: str
    report: dict[str, Any]

    @property
    def exposed(self) -> float:
        """What one waits for beside the prefill: the search, and what the chain does."""
        return self.ttft - self.prefill


def asked(chain: Runnable[Any, Any], question: str) -> Timing:
    """Stream an answer."""
    started_at, first, message = time.perf_counter(), 0.0, None
    for chunk in chain.stream(question):
        first = first or (time.perf_counter() if chunk.content else 0.0)
        message = chunk if message is None else message + chunk
    assert message is not None
    report = message.response_metadata["ragcachekit"]
    return Timing(1e3 * (first - started_at), report["ttft_ms"], message.content, report)


def chain_rows(
    rag: RagCache, workload: Workload, texts: Sequence[str], results: int, ef_search: int
) -> Iterator[dict[str, Any]]:
    """A row per way; RagCacheError if one answers otherwise than the other.

    A vector's document is one of ``texts``, which are all cached beforehand.
    """
    embeddings = Known(workload)
    graph: dict[str, Any] = {"links": LINKS, "ef_construction": EF_CONSTRUCTION, "ef_search": ef_search}
    store = RagCacheVectorStore(embeddings, index="faiss-hnsw", **graph)
    numbers = range(len(workload.chunks))
    store.index.add(list(numbers), workload.chunks, [texts[one % len(texts)] for one in numbers])
    rag.encode(list(texts))
    retriever = RagCacheRetriever.wrap(store, rag=rag, k=results)
    llm = ChatRagCache(rag=rag, max_tokens=8)
    plain = {"context": retriever | format_docs, "question": RunnablePassthrough()} | PROMPT | llm
    speculative = SpeculativeRag(retriever, PROMPT, llm)
    ways = {PLAIN: plain, SPECULATIVE: speculative}
    timed, searches = defaultdict[str, list[Timing]](list), list[float]()
    for chain in ways.values():
        asked(chain, workload.texts[0])
    for number, question in enumerate(tqdm(workload.texts, unit="question")):
        started_at = time.perf_counter()
        store.similarity_search(question, k=results)
        searches.append(1e3 * (time.perf_counter() - started_at))
        for way in WAYS if number % 2 else WAYS[::-1]:
            retriever.query_cache.clear()
            timed[way].append(asked(ways[way], question))
        if len({timed[way][-1].text for way in WAYS}) != 1:
            raise RagCacheError(f"{question!r} has another answer with speculation; no figures are given")
    base = timed[PLAIN]
    plain_prefill = statistics.fmean(one.prefill for one in base)
    for way in WAYS:
        exposed = [one.exposed for one in timed[way]]
        reports = [one.report.get("speculation") or {} for one in timed[way]]
        mean, ttft = statistics.fmean(exposed), statistics.fmean(one.ttft for one in timed[way])
        low, high = np.percentile(exposed, [10, 90]).tolist()
        yield {
            "vectors": len(workload.chunks),
            "ef_search": ef_search,
            "way": way,
            "search_ms": statistics.fmean(searches),
            "search_share": statistics.fmean(searches) / plain_prefill,
            "prefill_ms": statistics.fmean(one.prefill for one in timed[way]),
            "exposed_ms": mean,
            "exposed_ms_p10": low,
            "exposed_ms_p50": statistics.median(exposed),
            "exposed_ms_p90": high,
            "beyond_plain_prefill_ms": ttft - plain_prefill,
            "exposed_gain": statistics.fmean(one.exposed for one in base) / mean,
            "ttft_ms": ttft,
            "ttft_gain": statistics.fmean(one.ttft for one in base) / ttft,
            "provisional": sum(one.get("provisional", 0) for one in reports),
            "right": sum(one.get("right", False) for one in reports),
            "n": len(exposed),
        }
