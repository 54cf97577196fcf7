"""Lookups of the query cache in microseconds, by capacity, metric and kind of question."""

from __future__ import annotations

import itertools
import statistics
import time
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray
from tqdm.auto import tqdm

from benchmarks.query_cache.hits import PARTITION
from ragcachekit.commands import options as opt
from ragcachekit.commands.console import show, written
from ragcachekit.commands.report import BenchReport
from ragcachekit.retrieval.proximity import Hit, ProximityCache

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
Row = dict[str, Any]

FAR, NEAR, EQUAL = "far", "near", "equal"
TOLERANCE = 0.05

_DIMENSIONS = 32  # of the space that topics and wordings differ in; the rest is noise
_TOPICS = 200
_WORDINGS = 50  # of a topic, if there are more keys than so many of each
_CHECKED = 200  # lookups of each kind that are compared with a scan in float64
_ROWS_AT_A_TIME = 8192
_GAPS = {"cosine": 0.2, "ip": 0.2, "l2": 0.03}  # distances (l2) of near questions from their keys


def query_cache_lookup(
    capacities: Annotated[
        str, typer.Option(help="With commas between; 1000000 takes half an hour and 10 GiB.")
    ] = "300,1000,10000",
    metrics: Annotated[str, typer.Option(help="With commas between.")] = "cosine,l2,ip",
    dim: Annotated[int, typer.Option(min=1, help="Width of the embeddings.")] = 768,
    lookups: Annotated[int, typer.Option(min=1, help="Timed lookups of each kind.")] = 1000,
    seed: opt.Seed = 0,
    json: opt.Json = None,
) -> None:
    """Lookup times of a full query cache by capacity, metric and kind.

    Questions are made up: wordings of topics. ``far`` is a new wording beyond the tolerance, ``near`` a key
    with noise, ``equal`` a key. No figure is given if a hit or a miss is wrong.
    """
    sizes = [int(capacity) for capacity in opt.numbers("--capacities", capacities)]
    cases = itertools.product(sizes, opt.names(metrics))
    rows = [
        row for size, metric in cases for row in lookup_rows(size, dim, metric, lookups, seed, progress=True)
    ]
    report = BenchReport("query-cache-lookup", "made-up questions", seed, tuple(rows))
    show(report.table("One lookup, in microseconds (median, 10th and 90th percentile)"))
    written(report, json)


def lookup_rows(
    capacity: int, dim: int, metric: str, lookups: int, seed: int, *, progress: bool = False
) -> list[Row]:
    """The rows of one capacity and metric; RuntimeError if a hit or a miss is wrong."""
    questions = _Questions(capacity, dim, seed)
    stored = questions.draw(capacity)
    cache = ProximityCache(capacity, TOLERANCE, metric)
    start = time.perf_counter()
    for number, key in enumerate(tqdm(stored, f"{capacity} keys, {metric}", disable=not progress)):
        cache.insert(key, (number,), partition=PARTITION)
    insert_us = (time.perf_counter() - start) * 1e6 / capacity
    equal = stored[questions.rng.integers(0, capacity, lookups)]
    asked = {FAR: questions.draw(lookups), NEAR: questions.near(equal, _GAPS[metric]), EQUAL: equal}
    named = {"capacity": capacity, "dim": dim, "metric": metric}
    return [
        named | {"kind": kind} | _timed(cache, stored, rows) | {"insert_us": insert_us, "n": lookups}
        for kind, rows in asked.items()
    ]


def _timed(cache: ProximityCache, stored: Float32, rows: Float32) -> Row:
    spent, hits = [], []
    for row in list(rows):
        start = time.perf_counter_ns()
        hits.append(cache.lookup(row, partition=PARTITION))
        spent.append((time.perf_counter_ns() - start) / 1e3)
    chosen = slice(0, len(rows), max(1, len(rows) // _CHECKED))
    nearest = _nearest(cache.metric, stored, rows[chosen].astype(np.float64))
    for hit, gap in zip(hits[chosen], nearest.tolist(), strict=True):
        _check(cache, hit, gap)
    low, high = np.percentile(spent, [10, 90]).tolist()
    return {
        "hit_rate": sum(hit is not None for hit in hits) / len(hits),
        "lookup_us": statistics.median(spent),
        "lookup_us_p10": low,
        "lookup_us_p90": high,
    }


def _check(cache: ProximityCache, hit: Hit | None, nearest: float) -> None:
    slack = 1e-6 * (1 + nearest)
    if hit is None:
        wrong = nearest < cache.tolerance - slack
    else:
        wrong = not nearest - slack <= hit.distance <= nearest + slack
    if wrong:
        raise RuntimeError(f"the cache returned {hit}, but the nearest key lies at {nearest}")


def _nearest(metric: str, keys: Float32, queries: Float64) -> Float64:
    """Distances ``[n]`` of the nearest keys, in float64 and without shortcuts."""
    least = np.full(len(queries), np.inf)
    for start in range(0, len(keys), _ROWS_AT_A_TIME):
        some = keys[start : start + _ROWS_AT_A_TIME].astype(np.float64)
        np.minimum(least, _distances(metric, some, queries).min(axis=1), out=least)
    return least


def _distances(metric: str, keys: Float64, queries: Float64) -> Float64:
    dots = queries @ keys.T
    kk, qq = np.einsum("ij,ij->i", keys, keys), np.einsum("ij,ij->i", queries, queries)[:, None]
    if metric == "l2":
        return np.asarray(np.sqrt(np.maximum(0.0, qq + kk - 2 * dots)))
    if metric == "cosine":
        return np.asarray(1 - dots / np.sqrt(qq * kk))
    return np.asarray(np.maximum(qq, kk) - dots)


class _Questions:
    """Unit vectors around topics, which differ in few dimensions as those of sentences do."""

    def __init__(self, count: int, dim: int, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self._dim = dim
        self._topics = self._normal(max(_TOPICS, count // _WORDINGS), _DIMENSIONS)
        self._axes = self._normal(_DIMENSIONS, dim) / np.float32(np.sqrt(_DIMENSIONS))

    def draw(self, count: int) -> Float32:
        """Rows ``[count, dim]``."""
        out = np.empty((count, self._dim), np.float32)
        for start in range(0, count, _ROWS_AT_A_TIME):
            some = out[start : start + _ROWS_AT_A_TIME]
            topics = self._topics[self.rng.integers(0, len(self._topics), len(some))]
            wordings = topics + 0.45 * self._normal(len(some), _DIMENSIONS)
            some[:] = _units(wordings @ self._axes + 0.3 * self._normal(len(some), self._dim))
        return out

    def near(self, rows: Float32, gap: float) -> Float32:
        """The rows, each moved by about ``gap``."""
        return _units(rows + gap / np.sqrt(self._dim) * self._normal(len(rows), self._dim))

    def _normal(self, rows: int, columns: int) -> Float32:
        return self.rng.standard_normal((rows, columns), dtype=np.float32)


def _units(rows: NDArray[Any]) -> Float32:
    return np.asarray(rows / np.linalg.norm(rows, axis=1, keepdims=True), np.float32)
