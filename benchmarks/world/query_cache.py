"""The query-cache bench: made-up vectors, and questions of the sample world in four wordings, shuffled."""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from benchmarks.query_cache import lookup_rows
from benchmarks.world.world import make_world, variants
from ragcachekit.commands.bench import query_cache
from ragcachekit.commands.bench.query_cache import PARTITION, RESULTS, SWEEP, Row, Workload
from ragcachekit.commands.bench.report import BenchReport
from ragcachekit.commands.embedding import MiniLM
from ragcachekit.query.proximity import ProximityCache
from ragcachekit.query.retrieval import CachedRetrieval

LOOKUP, WRAPPER = "lookup", "wrapper"
NAME = "sample world, each question with four prefixes, shuffled; all-MiniLM-L6-v2"

_CAPACITIES = (300, 1000)
_DIM = 768
_METRICS = ("cosine", "l2", "ip")


def run(*, lookups: int = 2000, questions: int = 200, seed: int = 0, progress: bool = False) -> BenchReport:
    """Time lookups over made-up questions, and replay those of a world; 0 of these leave the sweep out.

    Rows have a ``part``: ``lookup`` and ``wrapper`` in microseconds, ``sweep`` as of
    :func:`ragcachekit.commands.bench.query_cache.sweep`.

    Raises RuntimeError if a timed cache disagrees with a plain oracle; no figure is given then.
    """
    found = workload(questions, seed, progress) if questions else None
    rows = [
        {"part": LOOKUP, **row}
        for capacity in _CAPACITIES
        for metric in _METRICS
        for row in lookup_rows(capacity, _DIM, metric, lookups, seed)
    ]
    rows.append({"part": WRAPPER, **wrapper_row(max(_CAPACITIES), _DIM, lookups, seed)})
    if found is not None:
        rows += query_cache.run(found).rows
    return BenchReport("query-cache", found.name if found else "random vectors", seed, tuple(rows))


def workload(questions: int, seed: int, progress: bool = False) -> Workload:
    """So many questions of a world, embedded.

    Raises
    ------
    ValueError
        If the world has not so many.
    """
    world, rng = make_world(seed), random.Random(seed)
    if not 0 < questions <= len(world.questions):
        raise ValueError(f"questions must be between 0 and {len(world.questions)}, got {questions}")
    chosen = rng.sample(world.questions, questions)
    asked = [text for question in chosen for text in variants(question.text)]
    rng.shuffle(asked)
    embedder = MiniLM()
    chunks = [chunk for article in world.articles for chunk in article.chunks]
    chunk_rows = embedder.embed(chunks, progress=progress)
    return Workload(NAME, embedder.embed(asked, progress=progress), chunk_rows, questions)


def plot(report: BenchReport, path: str | os.PathLike[str]) -> None:
    """Draw hit rate, recall and latency of the sweep over the tolerance, one line per capacity."""
    from matplotlib.figure import Figure  # not pyplot, which keeps figures in a global list

    rows = report.part(SWEEP).rows
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


def wrapper_row(capacity: int, dim: int, calls: int, seed: int) -> Row:
    """Microseconds that :class:`CachedRetrieval` adds to an uncached call, embedding and search aside.

    The cache is full, so that each call looks up, evicts and inserts.
    """
    rng = np.random.default_rng(seed)
    retrieval: CachedRetrieval[str] = CachedRetrieval(ProximityCache(capacity, 1e-3))
    questions = _units(rng, capacity + calls, dim)
    results = [[(RESULTS * i + j, "document") for j in range(RESULTS)] for i in range(len(questions))]
    spent = []
    for question, result in zip(questions, results, strict=True):
        start = time.perf_counter_ns()
        retrieval.get(question, PARTITION, lambda found=result: found)  # type: ignore[misc]
        spent.append((time.perf_counter_ns() - start) / 1e3)
    if retrieval.stats().hits:
        raise RuntimeError("a call was answered from the cache; the overhead of a miss was not measured")
    named = {"capacity": capacity, "dim": dim, "k": RESULTS}
    return named | _spread("overhead_us", spent[capacity:])


def _spread(name: str, spent: Sequence[float]) -> Row:
    median = statistics.median(spent)
    return {name: median, f"{name}_min": min(spent), f"{name}_max": max(spent), "n": len(spent)}


def _units(rng: np.random.Generator, rows: int, dim: int) -> NDArray[np.float32]:
    drawn = rng.standard_normal((rows, dim), dtype=np.float32)
    units: NDArray[np.float32] = drawn / np.linalg.norm(drawn, axis=1, keepdims=True)
    return units
