"""Pictures of the serving bench: TTFT over rate (RAGCache, fig. 15), throughput (Cache-Craft, fig. 22)."""

from __future__ import annotations

import os
import statistics
from collections import defaultdict
from typing import Any

from ragcachekit.commands.bench.report import BenchReport


def plot(report: BenchReport, path: str | os.PathLike[str]) -> None:
    """Draw first-token times of every system over the rate, and what each answers when all come at once.

    Solid lines are medians, dashed ones 99th percentiles, means of the runs. ValueError without rows.
    """
    from matplotlib.figure import Figure  # not pyplot, which keeps figures in a global list

    groups = defaultdict[str, dict[float | None, list[dict[str, Any]]]](lambda: defaultdict(list))
    for row in report.rows:
        name = ", ".join(filter(None, (row["system"], row["cache"], row["order"])))
        groups[name][row["rate"]].append(row)
    if not groups:
        raise ValueError("the report has no rows to draw")
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    times, answers = figure.subplots(1, 2)
    for name, rates in groups.items():
        at = sorted(rate for rate in rates if rate is not None)
        if not at:
            continue
        (line,) = times.plot(at, [_mean(rates[rate], "ttft_ms_p50") for rate in at], marker="o", label=name)
        p99 = [_mean(rates[rate], "ttft_ms_p99") for rate in at]
        times.plot(at, p99, linestyle="--", color=line.get_color(), linewidth=1)
    times.set(xlabel="requests per second", ylabel="time to first token (ms)", yscale="log")
    times.legend(fontsize=8, title="median; dashed: 99th percentile", title_fontsize=8)
    greatest = {name: _mean(rates[None], "throughput") for name, rates in groups.items() if None in rates}
    bars = answers.barh(list(greatest), list(greatest.values()))
    first = next(iter(greatest.values()))
    answers.bar_label(bars, [f"{value / first:.1f}x" for value in greatest.values()], padding=3)
    answers.margins(x=0.12)
    answers.invert_yaxis()
    answers.set_xlabel("answers per second, all requests at once")
    figure.suptitle(report.model, fontsize=9)
    figure.savefig(path, dpi=150)


def _mean(rows: list[dict[str, Any]], name: str) -> float:
    return statistics.fmean(row[name] for row in rows)
