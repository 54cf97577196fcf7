"""``python -m benchmarks routing``: which replica gets a request, simulated."""

from __future__ import annotations

import os
import statistics
from typing import Annotated, Any

import typer
from tqdm.auto import tqdm

from benchmarks.cluster.route_simulation import ROUTERS, WORKLOADS, Setting, simulate
from benchmarks.output import Plot, written
from ragcachekit.commands import options as opt
from ragcachekit.commands.console import show
from ragcachekit.commands.report import BenchReport

FIGURES = ("hit_rate", "requests", "work", "ttft_s")


def routing(
    replicas: Annotated[int, typer.Option(min=1)] = 8,
    requests: Annotated[int, typer.Option(min=5)] = 20_000,
    seeds: Annotated[int, typer.Option(min=1)] = 3,
    json: opt.Json = None,
    plot: Plot = None,
) -> None:
    """Hit rate, load and time to first token of routers: a row per workload and router, means over seeds.

    Replicas hold chunks in LRU caches; requests hold a set of chunks in any order. Ours is the choice that
    ``ragcachekit.cluster`` makes under Ray Serve, with the filters that replicas publish. Every router gets
    the same requests at the same times.
    """
    rows: list[dict[str, Any]] = []
    jobs = [(workload, name) for workload in WORKLOADS for name in ROUTERS]
    for workload, name in tqdm(jobs, unit="router"):
        results = [simulate(Setting(workload, replicas, requests, seed=seed), name) for seed in range(seeds)]
        means = {figure: statistics.mean(one[figure] for one in results) for figure in FIGURES}
        spread = max(one["hit_rate"] for one in results) - min(one["hit_rate"] for one in results)
        rows.append({"workload": workload, "router": name, **means, "hit_rate_spread": spread})
    for row in rows:
        even = next(r for r in rows if (r["workload"], r["router"]) == (row["workload"], "round robin"))
        row["times_round_robin"] = row["hit_rate"] / even["hit_rate"]
    report = BenchReport("routing", f"{replicas} simulated replicas", 0, tuple(rows))
    show(report.table(f"Routing over {report.model}"))
    written(report, json, plot, draw)


def draw(report: BenchReport, path: str | os.PathLike[str]) -> None:
    """Draw the hit rate of every router by workload, and how uneven the requests are."""
    from matplotlib.figure import Figure  # not pyplot, which keeps figures in a global list

    figure = Figure(figsize=(9, 3.2), layout="constrained")
    axes = figure.subplots(1, 2)
    names, kinds = list(ROUTERS), list(WORKLOADS)
    for ax, key, label in (
        (axes[0], "hit_rate", "share of chunk tokens cached"),
        (axes[1], "requests", "requests of the busiest replica / mean"),
    ):
        for place, name in enumerate(names):
            values = [row[key] for row in report.rows if row["router"] == name]
            ax.bar([n + 0.16 * (place - 2) for n in range(len(kinds))], values, 0.15, label=name)
        ax.set_xticks(range(len(kinds)), kinds)
        ax.set_ylabel(label)
    axes[1].axhline(1.0, color="grey", linewidth=0.8)
    axes[0].legend(fontsize=7)
    figure.savefig(path, dpi=120)
