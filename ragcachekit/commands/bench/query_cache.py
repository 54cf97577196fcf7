"""Query-cache bench: hit rates and lookup times over a user's questions (Proximity, section 4)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragcachekit.commands.bench.report import BenchReport
from ragcachekit.query.base import Partition, ResultId
from ragcachekit.query.proximity import ProximityCache
from ragcachekit.search.registry import open_index

SWEEP = "sweep"
PARTITION = Partition("bench", 1)
RESULTS = 4

_TOLERANCES = (0.0, 0.02, 0.05, 0.1)

Row = dict[str, Any]
Search = Callable[[NDArray[np.float32]], Sequence[ResultId]]


@dataclass(frozen=True, eq=False)
class Workload:
    """Embeddings ``[n, dim]`` of questions in the order they are asked, and of the chunks to search.

    ``distinct`` counts different questions: the sweep's capacities are a tenth, half and all of them.
    """

    name: str
    questions: NDArray[np.float32]
    chunks: NDArray[np.float32]
    distinct: int


def run(workload: Workload) -> BenchReport:
    """Replay a workload; rows of the part ``sweep`` as of :func:`sweep`."""
    n, search = workload.distinct, _index_of(workload.chunks)
    capacities = sorted({max(1, n // 10), max(1, n // 2), n})
    rows = [{"part": SWEEP, **row} for row in sweep(workload.questions, search, capacities)]
    return BenchReport("query-cache", workload.name, 0, tuple(rows))


def sweep(
    questions: NDArray[np.float32],
    search: Search,
    capacities: Sequence[int],
    tolerances: Sequence[float] = _TOLERANCES,
) -> list[Row]:
    """Replay questions ``[n, dim]``, at least one, against every capacity and tolerance (cosine distance).

    ``search`` is the index without a cache. ``lookup_us`` is a median, ``latency_ms`` and
    ``latency_ms_uncached`` are means; ``result_recall`` is the mean share of the index's own results.
    """
    start = time.perf_counter()
    expected = [tuple(search(question)) for question in questions]
    uncached_ms = (time.perf_counter() - start) * 1e3 / len(questions)
    caches = [ProximityCache(capacity, t, "cosine") for capacity in capacities for t in tolerances]
    return [_replay(questions, search, expected, uncached_ms, cache) for cache in caches]


def _index_of(chunks: NDArray[np.float32]) -> Search:
    index = open_index("faiss-flat", chunks.shape[1])
    index.add(range(len(chunks)), chunks)
    return lambda question: index.search(question, RESULTS).ids


def _replay(
    questions: NDArray[np.float32],
    search: Search,
    expected: Sequence[tuple[ResultId, ...]],
    uncached_ms: float,
    cache: ProximityCache,
) -> Row:
    lookups_us, total_ns, recall = [], 0, 0.0
    for question, right in zip(questions, expected, strict=True):
        start = time.perf_counter_ns()
        hit = cache.lookup(question, partition=PARTITION)
        looked_up = time.perf_counter_ns()
        ids = hit.ids if hit else tuple(search(question))
        if not hit:
            cache.insert(question, ids, partition=PARTITION)
        total_ns += time.perf_counter_ns() - start
        lookups_us.append((looked_up - start) / 1e3)
        recall += len(set(right).intersection(ids)) / len(set(right)) if right else 1.0
    return {
        "capacity": cache.capacity,
        "tolerance": cache.tolerance,
        "hit_rate": cache.stats().hit_rate,
        "lookup_us": statistics.median(lookups_us),
        "latency_ms": total_ns / 1e6 / len(questions),
        "latency_ms_uncached": uncached_ms,
        "result_recall": recall / len(questions),
    }
