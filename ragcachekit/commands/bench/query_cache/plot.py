"""Picture of the query-cache bench: heat maps over capacity and tolerance (Proximity, figure 3)."""

from __future__ import annotations

import os

import numpy as np

from ragcachekit.commands.bench.query_cache.run import SWEEP
from ragcachekit.commands.bench.report import BenchReport

PANELS = {
    "hit_rate": "hit rate",
    "latency_saved": "search time saved",
    "result_recall": "recall of results",
    "evidence": "chunk with the answer found",
    "answer_f1": "F1 of answers",
    "wrong_hits": "hits on another question",
}


def plot(report: BenchReport, path: str | os.PathLike[str]) -> None:
    """Draw a heat map per figure that the report has; ValueError if there is nothing to draw."""
    from matplotlib.figure import Figure  # not pyplot, which keeps figures in a global list

    rows = report.part(SWEEP).rows
    if not rows:
        raise ValueError("the report has no rows to draw")
    capacities = sorted({row["capacity"] for row in rows})
    tolerances = sorted({row["tolerance"] for row in rows})
    names = [name for name in PANELS if name in rows[0]]
    figure = Figure(figsize=(3.6 * len(names), 3.4), layout="constrained")
    for axes, name in zip(np.atleast_1d(figure.subplots(1, len(names))), names, strict=True):
        cells = {(row["tolerance"], row["capacity"]): row[name] for row in rows}
        values = np.array([[cells[tolerance, size] for size in capacities] for tolerance in tolerances])
        axes.imshow(values, vmin=0, vmax=1, cmap="viridis", aspect="auto", origin="lower")
        for (y, x), value in np.ndenumerate(values):
            colour = "white" if value < 0.6 else "black"
            axes.text(
                x, y, f"{round(value, 2) + 0.0:.0%}", ha="center", va="center", color=colour, fontsize=8
            )
        axes.set_xticks(range(len(capacities)), [str(size) for size in capacities])
        axes.set_yticks(range(len(tolerances)), [f"{tolerance:g}" for tolerance in tolerances])
        axes.set_xlabel("capacity (entries)")
        axes.set_title(PANELS[name], fontsize=10)
    figure.axes[0].set_ylabel("tolerance (cosine distance)")
    figure.suptitle(report.model, fontsize=9)
    figure.savefig(path, dpi=150)
