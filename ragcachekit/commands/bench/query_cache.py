"""Query-cache bench: lookup times, the wrapper's overhead, hit rates (Proximity, section 4)."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragcachekit.commands.bench.report import BenchReport
from ragcachekit.query.base import Hit, Partition, ResultId
from ragcachekit.query.proximity import ProximityCache
from ragcachekit.query.retrieval import CachedRetrieval
from ragcachekit.search.registry import open_index

LOOKUP, WRAPPER, SWEEP = "lookup", "wrapper", "sweep"

_PARTITION = Partition("bench", 1)
_CAPACITIES = (300, 1000)
_DIM = 768
_METRICS = ("cosine", "l2", "ip")
_TOLERANCES = (0.0, 0.02, 0.05, 0.1)
_RESULTS = 4
_CHECKED = 200  # lookups of each timing that are compared with the oracle

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


def measure(workload: Workload | None = None, *, lookups: int = 2000, seed: int = 0) -> BenchReport:
    """Time lookups over random vectors and, where there is a workload, replay it.

    Rows have a ``part``: ``lookup`` and ``wrapper`` in microseconds, ``sweep`` as of :func:`sweep`.

    Raises RuntimeError if the cache disagrees with a plain oracle; no figure is given then.
    """
    rows = [
        {"part": LOOKUP, **row}
        for capacity in _CAPACITIES
        for metric in _METRICS
        for row in lookup_rows(capacity, _DIM, metric, lookups, seed)
    ]
    rows.append({"part": WRAPPER, **wrapper_row(max(_CAPACITIES), _DIM, lookups, seed)})
    if workload is not None:
        n, search = workload.distinct, _index_of(workload.chunks)
        capacities = sorted({max(1, n // 10), max(1, n // 2), n})
        rows += [{"part": SWEEP, **row} for row in sweep(workload.questions, search, capacities)]
    return BenchReport("query-cache", workload.name if workload else "random vectors", seed, tuple(rows))


def lookup_rows(capacity: int, dim: int, metric: str, lookups: int, seed: int) -> list[Row]:
    """Microseconds of a lookup in a full cache of random unit vectors: miss, hit nearby, repetition."""
    rng = np.random.default_rng(seed)
    cache = ProximityCache(capacity, 0.05, metric, dim=dim)
    oracle = _Oracle(cache, dim)
    keys = _units(rng, capacity, dim)
    for slot, key in enumerate(keys):
        cache.insert(key, (slot,), partition=_PARTITION)
        oracle.insert(key)
    strangers, repeated = _units(rng, lookups, dim), keys[rng.integers(0, capacity, lookups)]
    nearby = (repeated + 0.01 * strangers).astype(np.float32)
    out = []
    for kind, asked in {"miss": strangers, "near": nearby, "repeat": repeated}.items():
        spent, hits = [], []
        for row in list(asked):
            start = time.perf_counter_ns()
            hits.append(cache.lookup(row, partition=_PARTITION))
            spent.append((time.perf_counter_ns() - start) / 1e3)
        for at in range(0, lookups, max(1, lookups // _CHECKED)):
            oracle.check(asked[at], hits[at])
        named = {"capacity": capacity, "dim": dim, "metric": metric, "kind": kind}
        out.append(named | _spread("lookup_us", spent))
    return out


def wrapper_row(capacity: int, dim: int, calls: int, seed: int) -> Row:
    """Microseconds that :class:`CachedRetrieval` adds to an uncached call, embedding and search aside.

    The cache is full, so that each call looks up, evicts and inserts.
    """
    rng = np.random.default_rng(seed)
    retrieval: CachedRetrieval[str] = CachedRetrieval(ProximityCache(capacity, 1e-3))
    questions = _units(rng, capacity + calls, dim)
    results = [[(_RESULTS * i + j, "document") for j in range(_RESULTS)] for i in range(len(questions))]
    spent = []
    for question, result in zip(questions, results, strict=True):
        start = time.perf_counter_ns()
        retrieval.get(question, _PARTITION, lambda found=result: found)  # type: ignore[misc]
        spent.append((time.perf_counter_ns() - start) / 1e3)
    if retrieval.stats().hits:
        raise RuntimeError("a call was answered from the cache; the overhead of a miss was not measured")
    named = {"capacity": capacity, "dim": dim, "k": _RESULTS}
    return named | _spread("overhead_us", spent[capacity:])


def sweep(
    questions: NDArray[np.float32],
    search: Search,
    capacities: Sequence[int],
    tolerances: Sequence[float] = _TOLERANCES,
) -> list[Row]:
    """Replay questions ``[n, dim]`` against every capacity and tolerance (cosine distance).

    ``search`` is the index without a cache. ``lookup_us`` is a median, ``latency_ms`` and
    ``latency_ms_uncached`` are means; ``result_recall`` is the mean share of the index's own results.

    Raises RuntimeError if a lookup disagrees with a plain float64 oracle.
    """
    start = time.perf_counter()
    expected = [tuple(search(question)) for question in questions]
    uncached_ms = (time.perf_counter() - start) * 1e3 / max(1, len(questions))
    caches = [ProximityCache(capacity, t, "cosine") for capacity in capacities for t in tolerances]
    return [_replay(questions, search, expected, uncached_ms, cache) for cache in caches]


def plot(report: BenchReport, path: str | os.PathLike[str]) -> None:
    """Draw hit rate, recall and latency of the sweep over the tolerance, one line per capacity."""
    from matplotlib.figure import Figure  # not pyplot, which keeps figures in a global list

    rows = report.part(SWEEP).rows
    if not rows:
        raise ValueError("there is no sweep to draw: it needs questions and chunks")
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    panels = figure.subplots(1, 3)
    for axes, name in zip(panels, ("hit_rate", "result_recall", "latency_ms"), strict=True):
        for capacity in dict.fromkeys(row["capacity"] for row in rows):
            line = [(row["tolerance"], row[name]) for row in rows if row["capacity"] == capacity]
            axes.plot(*zip(*line, strict=True), "o-", label=f"{capacity} entries")
        axes.set_xlabel("tolerance (cosine distance)")
        axes.set_ylabel(name.replace("_", " "))
    panels[2].axhline(rows[0]["latency_ms_uncached"], ls="--", color="grey", label="without the cache")
    panels[2].legend(fontsize=8)
    figure.savefig(path)


def _index_of(chunks: NDArray[np.float32]) -> Search:
    index = open_index("faiss-flat", chunks.shape[1])
    index.add(range(len(chunks)), chunks)
    return lambda question: index.search(question, _RESULTS).ids


def _replay(
    questions: NDArray[np.float32],
    search: Search,
    expected: Sequence[tuple[ResultId, ...]],
    uncached_ms: float,
    cache: ProximityCache,
) -> Row:
    oracle = _Oracle(cache, questions.shape[1])
    lookups_us, total_ns, recall = [], 0, 0.0
    for question, right in zip(questions, expected, strict=True):
        start = time.perf_counter_ns()
        hit = cache.lookup(question, partition=_PARTITION)
        looked_up = time.perf_counter_ns()
        ids = hit.ids if hit else tuple(search(question))
        if not hit:
            cache.insert(question, ids, partition=_PARTITION)
        total_ns += time.perf_counter_ns() - start
        lookups_us.append((looked_up - start) / 1e3)
        oracle.check(question, hit)
        if not hit:
            oracle.insert(question)
        recall += len(set(right).intersection(ids)) / len(set(right)) if right else 1.0
    count = max(1, len(questions))
    return {
        "capacity": cache.capacity,
        "tolerance": cache.tolerance,
        "hit_rate": cache.stats().hit_rate,
        "lookup_us": statistics.median(lookups_us) if lookups_us else 0.0,
        "latency_ms": total_ns / 1e6 / count,
        "latency_ms_uncached": uncached_ms,
        "result_recall": recall / count,
    }


def _spread(name: str, spent: Sequence[float]) -> Row:
    median = statistics.median(spent)
    return {name: median, f"{name}_min": min(spent), f"{name}_max": max(spent), "n": len(spent)}


def _units(rng: np.random.Generator, rows: int, dim: int) -> NDArray[np.float32]:
    drawn = rng.standard_normal((rows, dim), dtype=np.float32)
    units: NDArray[np.float32] = drawn / np.linalg.norm(drawn, axis=1, keepdims=True)
    return units


class _Oracle:
    """The keys of a first-in-first-out cache, compared in float64 without shortcuts."""

    def __init__(self, cache: ProximityCache, dim: int) -> None:
        self._cache = cache
        self._keys = np.empty((cache.capacity, dim))
        self._inserted = 0

    def insert(self, key: NDArray[np.float32]) -> None:
        self._keys[self._inserted % len(self._keys)] = key
        self._inserted += 1

    def check(self, query: NDArray[np.float32], hit: Hit | None) -> None:
        """RuntimeError unless the hit is the nearest key, or the miss beyond the tolerance."""
        keys = self._keys[: self._inserted]
        nearest = float(self._distances(keys, query.astype(np.float64)).min(initial=np.inf))
        slack = 1e-6 * (1 + nearest) if len(keys) else 0.0
        if hit is None:
            wrong = nearest < self._cache.tolerance - slack or bool((keys == query).all(axis=1).any())
        else:
            wrong = abs(hit.distance - nearest) > slack or hit.distance > self._cache.tolerance
        if wrong:
            raise RuntimeError(f"the cache returned {hit}, but the nearest key lies at {nearest}")

    def _distances(self, keys: NDArray[np.float64], query: NDArray[np.float64]) -> NDArray[np.float64]:
        if self._cache.metric == "l2":
            return np.asarray(np.linalg.norm(keys - query, axis=1))
        dots, squares = keys @ query, np.einsum("ij,ij->i", keys, keys)
        if self._cache.metric == "cosine":
            return np.asarray(1 - dots / np.sqrt(squares * (query @ query)))
        return np.asarray(np.maximum(squares, query @ query) - dots)
