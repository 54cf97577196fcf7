"""What ``bench query-cache`` shows: lookups, the wrapper's overhead, and a sweep over the sample world."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import asdict

import numpy as np
from numpy.typing import NDArray

from ragcachekit.bench.embedding import DIM, MiniLM
from ragcachekit.bench.query_cache import lookup_timings, run, wrapper_overhead
from ragcachekit.bench.report import BenchReport
from ragcachekit.bench.world import make_world, variants
from ragcachekit.query.base import ResultId
from ragcachekit.search.registry import open_index

LOOKUP, WRAPPER, SWEEP = "lookup", "wrapper", "sweep"
WORKLOAD = "sample world, each question with four prefixes, shuffled; all-MiniLM-L6-v2"


def measure(
    *,
    capacities: Sequence[int] = (300, 1000),
    dim: int = 768,
    lookups: int = 2000,
    questions: int = 200,
    tolerances: Sequence[float] = (0.0, 0.02, 0.05, 0.1),
    k: int = 4,
    seed: int = 0,
    progress: bool = False,
) -> BenchReport:
    """Run all three parts.

    Parameters
    ----------
    capacities, dim, lookups
        Of the timed lookups, in caches of random vectors.
    questions : int
        Of the sweep, each asked four times in other words; 0 leaves the sweep out.
    tolerances : sequence of float
        Cosine distances of the sweep; its capacities are a tenth, half and all of the questions.
    k : int
        Results per search.
    seed : int
    progress : bool
        Show a bar while embedding.

    Returns
    -------
    BenchReport
        Rows with ``part``: ``lookup`` (as :class:`~ragcachekit.bench.query_cache.LookupTiming`),
        ``wrapper`` (as ``WrapperOverhead``), ``sweep`` (as :func:`ragcachekit.bench.query_cache.run`).

    Raises
    ------
    RetrievalError
        The embedding model is not installed.
    RuntimeError
        The cache disagreed with a plain oracle; no figure is given then.
    """
    rows = [
        {"part": LOOKUP, **asdict(timing)}
        for timing in lookup_timings(capacities=capacities, dims=(dim,), lookups=lookups, seed=seed)
    ]
    overhead = wrapper_overhead(capacity=max(capacities), dim=dim, k=k, calls=lookups, seed=seed)
    rows.append({"part": WRAPPER, **asdict(overhead)})
    if questions:
        rows += [{"part": SWEEP, **row} for row in _sweep(questions, tolerances, k, seed, progress)]
    return BenchReport("query-cache", WORKLOAD, seed, tuple(rows))


def part(report: BenchReport, name: str) -> BenchReport:
    """The report with the rows of one part only, without the column that says so."""
    rows = tuple(
        {key: value for key, value in row.items() if key != "part"}
        for row in report.rows
        if row["part"] == name
    )
    return BenchReport(report.bench, report.model, report.seed, rows)


def plot(report: BenchReport, path: str | os.PathLike[str]) -> None:
    """Draw hit rate and result recall of the sweep over the tolerance, one line per capacity."""
    from matplotlib.figure import Figure  # not pyplot, which keeps figures in a global list

    rows = part(report, SWEEP).rows
    if not rows:
        raise ValueError("there is no sweep to draw; ask for more than 0 questions")
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    axes = figure.subplots(1, 3)
    for at, (name, label) in enumerate(
        [
            ("hit_rate", "hit rate"),
            ("result_recall", "recall of the index's results"),
            ("latency_ms", "ms per question"),
        ]
    ):
        for capacity in dict.fromkeys(row["capacity"] for row in rows):
            line = [row for row in rows if row["capacity"] == capacity]
            axes[at].plot(
                [r["tolerance"] for r in line], [r[name] for r in line], "o-", label=f"{capacity} entries"
            )
        axes[at].set_xlabel("tolerance (cosine distance)")
        axes[at].set_ylabel(label)
    axes[2].axhline(rows[0]["latency_ms_uncached"], ls="--", color="grey", label="without the cache")
    axes[2].legend(fontsize=8)
    figure.savefig(path)


def _sweep(
    questions: int, tolerances: Sequence[float], k: int, seed: int, progress: bool
) -> list[dict[str, float]]:
    world, rng = make_world(seed), random.Random(seed)
    if questions < 0 or questions > len(world.questions):
        raise ValueError(f"questions must be between 0 and {len(world.questions)}, got {questions}")
    chosen = rng.sample(world.questions, questions)
    asked = [text for question in chosen for text in variants(question.text)]
    rng.shuffle(asked)
    embedder = MiniLM()
    chunks = [chunk for article in world.articles for chunk in article.chunks]
    index = open_index("faiss-flat", DIM)
    index.add(range(len(chunks)), embedder.embed(chunks, progress=progress))

    def search(question: NDArray[np.float32]) -> tuple[ResultId, ...]:
        return index.search(question, k).ids

    sizes = sorted({max(1, questions // 10), max(1, questions // 2), questions})
    return run(embedder.embed(asked, progress=progress), search, capacities=sizes, tolerances=tolerances)
