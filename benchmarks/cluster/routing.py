"""Which replica gets a request: hit rate, load and time to first token of routers, simulated.

Replicas hold chunks in LRU caches; requests hold a set of chunks in any order. Ours is the choice that
``ragcachekit.cluster`` makes under Ray Serve, with the filters that replicas publish. Every router gets the
same requests at the same times; the figures are means over ``--seeds``.

    python benchmarks/cluster/routing.py --json out.json --plot out.png
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from benchmarks.cluster.route_simulation import ROUTERS, WORKLOADS, Setting, simulate
from ragcachekit.commands.bench.report import BenchReport
from ragcachekit.commands.console import show

FIGURES = ("hit_rate", "requests", "work", "ttft_s")


def run(given: argparse.Namespace) -> BenchReport:
    """A row per workload and router."""
    rows: list[dict[str, Any]] = []
    jobs = [(workload, name) for workload in WORKLOADS for name in ROUTERS]
    for workload, name in tqdm(jobs, unit="router"):
        results = [
            simulate(Setting(workload, given.replicas, given.requests, seed=seed), name)
            for seed in range(given.seeds)
        ]
        means = {figure: statistics.mean(one[figure] for one in results) for figure in FIGURES}
        spread = max(one["hit_rate"] for one in results) - min(one["hit_rate"] for one in results)
        rows.append({"workload": workload, "router": name, **means, "hit_rate_spread": spread})
    for row in rows:
        even = next(r for r in rows if (r["workload"], r["router"]) == (row["workload"], "round robin"))
        row["times_round_robin"] = row["hit_rate"] / even["hit_rate"]
    return BenchReport("routing", f"{given.replicas} simulated replicas", 0, tuple(rows))


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Hit rate of every router by workload, and how uneven the requests are."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    names, kinds = list(ROUTERS), list(WORKLOADS)
    for ax, key, label in (
        (axes[0], "hit_rate", "share of chunk tokens cached"),
        (axes[1], "requests", "requests of the busiest replica / mean"),
    ):
        for place, name in enumerate(names):
            values = [row[key] for row in rows if row["router"] == name]
            ax.bar([n + 0.16 * (place - 2) for n in range(len(kinds))], values, 0.15, label=name)
        ax.set_xticks(range(len(kinds)), kinds)
        ax.set_ylabel(label)
    axes[1].axhline(1.0, color="grey", linewidth=0.8)
    axes[0].legend(fontsize=7)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    given = parser.parse_args()
    report = run(given)
    show(report.table(f"Routing over {report.model}"))
    if given.json:
        report.write_json(given.json)
    if given.plot:
        plot(report.rows, given.plot)


if __name__ == "__main__":
    main()
