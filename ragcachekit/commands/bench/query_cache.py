"""What the query cache costs and what it returns (Proximity, section 4: hit rate, latency, recall)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ragcachekit.query.base import Hit, Partition, ResultId
from ragcachekit.query.proximity import ProximityCache
from ragcachekit.query.retrieval import CachedRetrieval

_PARTITION = Partition("bench", 1)
_CHECKED = 200  # lookups of each timing that are compared with the oracle


@dataclass(frozen=True)
class LookupTiming:
    """Microseconds of one lookup in a full cache: a miss, a hit nearby, a repeated question."""

    capacity: int
    dim: int
    metric: str
    kind: str
    lookup_us: float
    lookup_us_min: float
    lookup_us_max: float
    n: int


@dataclass(frozen=True)
class WrapperOverhead:
    """Microseconds that a cached retriever adds to an uncached call, embedding aside."""

    capacity: int
    dim: int
    k: int
    overhead_us: float
    overhead_us_min: float
    overhead_us_max: float
    n: int


def run(
    embeddings: ArrayLike,
    search: Callable[[NDArray[np.float32]], Sequence[ResultId]],
    *,
    capacities: Sequence[int] = (10, 100, 300, 1000),
    tolerances: Sequence[float] = (0.0, 0.02, 0.05, 0.1),
    metric: str = "cosine",
    eviction: str = "fifo",
) -> list[dict[str, Any]]:
    """Replay a workload against every capacity and tolerance (in the metric's unit).

    ``embeddings`` ``[n, dim]`` are those of the questions, in the order they are asked; ``search`` is the
    index without a cache, from one embedding to ordered result ids. Rows have ``capacity, tolerance,
    hit_rate, lookup_us`` (median), ``latency_ms`` and ``latency_ms_uncached`` (means per question), and
    ``result_recall``, the mean share of the index's own results that were returned.

    Raises
    ------
    RuntimeError
        A lookup disagreed with a plain float64 oracle: no number is reported then.
    """
    questions = np.ascontiguousarray(embeddings, np.float32)
    truth, uncached_ms = _uncached(questions, search)
    return [
        _replay(questions, search, truth, uncached_ms, ProximityCache(capacity, tolerance, metric, eviction))
        for capacity in capacities
        for tolerance in tolerances
    ]


def lookup_timings(
    *,
    capacities: Sequence[int] = (300, 1000),
    dims: Sequence[int] = (768,),
    metrics: Sequence[str] = ("cosine", "l2", "ip"),
    lookups: int = 2000,
    seed: int = 0,
) -> list[LookupTiming]:
    """Time single lookups in full caches of random unit vectors; 200 answers of each kind are checked.

    Raises RuntimeError as :func:`run`.
    """
    return [
        timing
        for capacity in capacities
        for dim in dims
        for metric in metrics
        for timing in _time_cache(capacity, dim, metric, lookups, seed)
    ]


def wrapper_overhead(
    *, capacity: int = 1000, dim: int = 768, k: int = 4, calls: int = 2000, seed: int = 0
) -> WrapperOverhead:
    """Time uncached calls of :class:`CachedRetrieval` around a search that costs nothing.

    The cache is full, so that each call looks up, evicts and inserts.
    """
    rng = np.random.default_rng(seed)
    retrieval: CachedRetrieval[str] = CachedRetrieval(ProximityCache(capacity, 1e-3))
    questions = _units(rng, capacity + calls, dim)
    results = [[(k * i + j, "document") for j in range(k)] for i in range(len(questions))]
    spent = []
    for question, result in zip(questions, results, strict=True):
        start = time.perf_counter_ns()
        retrieval.get(question, _PARTITION, lambda found=result: found)  # type: ignore[misc]
        spent.append((time.perf_counter_ns() - start) / 1e3)
    if retrieval.stats().hits:
        raise RuntimeError("a call was answered from the cache; the overhead of a miss was not measured")
    spent = spent[capacity:]
    return WrapperOverhead(capacity, dim, k, statistics.median(spent), min(spent), max(spent), calls)


def _uncached(
    questions: NDArray[np.float32], search: Callable[[NDArray[np.float32]], Sequence[ResultId]]
) -> tuple[list[tuple[ResultId, ...]], float]:
    start = time.perf_counter()
    truth = [tuple(search(question)) for question in questions]
    return truth, (time.perf_counter() - start) * 1e3 / max(1, len(questions))


def _replay(
    questions: NDArray[np.float32],
    search: Callable[[NDArray[np.float32]], Sequence[ResultId]],
    truth: list[tuple[ResultId, ...]],
    uncached_ms: float,
    cache: ProximityCache,
) -> dict[str, Any]:
    oracle = _Oracle(cache)
    lookups_us, total_ns, recall = [], 0, 0.0
    for question, expected in zip(questions, truth, strict=True):
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
            oracle.insert(question, ids)
        recall += _recall(ids, expected)
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


def _recall(ids: Sequence[ResultId], expected: Sequence[ResultId]) -> float:
    wanted = set(expected)
    return len(wanted.intersection(ids)) / len(wanted) if wanted else 1.0


def _time_cache(capacity: int, dim: int, metric: str, lookups: int, seed: int) -> list[LookupTiming]:
    rng = np.random.default_rng(seed)
    cache = ProximityCache(capacity, 0.05, metric, dim=dim)
    oracle = _Oracle(cache)
    keys = _units(rng, capacity, dim)
    for slot, key in enumerate(keys):
        cache.insert(key, (slot,), partition=_PARTITION)
    oracle.fill(keys)
    strangers, repeated = _units(rng, lookups, dim), keys[rng.integers(0, capacity, lookups)]
    nearby = (repeated + 0.01 * strangers).astype(np.float32)
    workloads = {"miss": strangers, "near": nearby, "repeat": repeated}
    return [_time_lookups(cache, oracle, metric, kind, rows) for kind, rows in workloads.items()]


def _time_lookups(
    cache: ProximityCache, oracle: _Oracle, metric: str, kind: str, rows: NDArray[np.float32]
) -> LookupTiming:
    spent, hits = [], []
    for row in list(rows):
        start = time.perf_counter_ns()
        hit = cache.lookup(row, partition=_PARTITION)
        spent.append((time.perf_counter_ns() - start) / 1e3)
        hits.append(hit)
    for at in range(0, len(hits), max(1, len(hits) // _CHECKED)):
        oracle.check(rows[at], hits[at])
    median = statistics.median(spent)
    dim = rows.shape[1]
    return LookupTiming(cache.capacity, dim, metric, kind, median, min(spent), max(spent), len(spent))


def _units(rng: np.random.Generator, rows: int, dim: int) -> NDArray[np.float32]:
    drawn = rng.standard_normal((rows, dim), dtype=np.float32)
    units: NDArray[np.float32] = drawn / np.linalg.norm(drawn, axis=1, keepdims=True)
    return units


class _Oracle:
    """The same cache as a plain list of keys, oldest first, compared in float64 without shortcuts."""

    def __init__(self, cache: ProximityCache) -> None:
        self._cache = cache
        self._lru = cache.eviction == "lru"
        self._keys: NDArray[np.float64] = np.empty((0, 0))
        self._ids: list[tuple[ResultId, ...]] = []

    def insert(self, key: NDArray[np.float32], ids: Sequence[ResultId]) -> None:
        first = 1 if len(self._ids) == self._cache.capacity else 0
        kept = self._keys[first:] if self._ids else np.empty((0, key.size))
        self._keys = np.concatenate([kept, key[None].astype(np.float64)])
        self._ids = [*self._ids[first:], tuple(ids)]

    def fill(self, keys: NDArray[np.float32]) -> None:
        """Start with these keys, each with its row as the only id."""
        self._keys = keys.astype(np.float64)
        self._ids = [(row,) for row in range(len(keys))]

    def check(self, query: NDArray[np.float32], hit: Hit | None) -> None:
        """RuntimeError unless the hit is the nearest key, or the miss beyond the tolerance."""
        distances = self._distances(query)
        nearest = float(distances.min()) if distances.size else float("inf")
        slack = 1e-6 * (1 + nearest) if distances.size else 0.0
        if hit is None:
            wrong = nearest < self._cache.tolerance - slack or self._holds(query)
        else:
            wrong = abs(hit.distance - nearest) > slack or hit.distance > self._cache.tolerance
        if wrong:
            raise RuntimeError(f"the cache said {hit}, but the nearest key lies at {nearest}")
        if hit is not None and self._lru:
            self._refresh(int(distances.argmin()))

    def _holds(self, query: NDArray[np.float32]) -> bool:
        return bool(self._ids) and bool((self._keys == query).all(axis=1).any())

    def _refresh(self, at: int) -> None:
        order = [i for i in range(len(self._ids)) if i != at] + [at]
        self._keys, self._ids = self._keys[order], [self._ids[i] for i in order]

    def _distances(self, query: NDArray[np.float32]) -> NDArray[np.float64]:
        if not self._ids:
            return np.empty(0)
        wide, keys = query.astype(np.float64), self._keys
        if self._cache.metric == "l2":
            return np.asarray(np.linalg.norm(keys - wide, axis=1))
        dots, squares = keys @ wide, np.einsum("ij,ij->i", keys, keys)
        if self._cache.metric == "cosine":
            return np.asarray(1 - dots / np.sqrt(squares * (wide @ wide)))
        return np.asarray(np.maximum(squares, wide @ wide) - dots)
