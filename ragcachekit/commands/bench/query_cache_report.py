"""What ``bench query-cache`` shows: lookups, the wrapper's overhead, and a sweep over a workload."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from ragcachekit.commands.bench.query_cache import lookup_timings, run, wrapper_overhead
from ragcachekit.commands.bench.report import BenchReport
from ragcachekit.query.base import ResultId
from ragcachekit.search.registry import open_index

LOOKUP, WRAPPER, SWEEP = "lookup", "wrapper", "sweep"
TOLERANCES = (0.0, 0.02, 0.05, 0.1)


@dataclass(frozen=True, eq=False)
class Workload:
    """What a sweep replays: embeddings ``[n, dim]`` of questions, in their order, and of what is searched.

    ``distinct`` counts different questions: the sweep's capacities are a tenth, half and all of them.
    """

    name: str
    questions: NDArray[np.float32]
    chunks: NDArray[np.float32]
    distinct: int


def measure(
    workload: Workload | None = None,
    *,
    capacities: Sequence[int] = (300, 1000),
    dim: int = 768,
    lookups: int = 2000,
    tolerances: Sequence[float] = TOLERANCES,
    k: int = 4,
    seed: int = 0,
) -> BenchReport:
    """Time lookups over random vectors and, where there is a workload, replay it.

    ``capacities``, ``dim`` and ``lookups`` are of the timed lookups; ``tolerances`` (cosine distances) and
    ``k`` results per search of the sweep. Rows have a ``part``: ``lookup`` (as ``LookupTiming``),
    ``wrapper`` (as ``WrapperOverhead``) or ``sweep`` (as :func:`ragcachekit.commands.bench.query_cache.run`).

    Raises RuntimeError: the cache disagreed with a plain oracle; no figure is given then.
    """
    rows = [
        {"part": LOOKUP, **asdict(timing)}
        for timing in lookup_timings(capacities=capacities, dims=(dim,), lookups=lookups, seed=seed)
    ]
    overhead = wrapper_overhead(capacity=max(capacities), dim=dim, k=k, calls=lookups, seed=seed)
    rows.append({"part": WRAPPER, **asdict(overhead)})
    if workload is not None:
        rows += [{"part": SWEEP, **row} for row in _sweep(workload, tolerances, k)]
    return BenchReport("query-cache", workload.name if workload else "random vectors", seed, tuple(rows))


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
        raise ValueError("there is no sweep to draw: it needs questions and chunks")
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


def _sweep(workload: Workload, tolerances: Sequence[float], k: int) -> list[dict[str, float]]:
    index = open_index("faiss-flat", workload.chunks.shape[1])
    index.add(range(len(workload.chunks)), workload.chunks)

    def search(question: NDArray[np.float32]) -> tuple[ResultId, ...]:
        return index.search(question, k).ids

    n = workload.distinct
    sizes = sorted({max(1, n // 10), max(1, n // 2), n})
    return run(workload.questions, search, capacities=sizes, tolerances=tolerances)
