"""planner: does loading-or-computing get decided right?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ragcachekit.commands.console import show, written
from ragcachekit.commands.options import Json, Plot, Seed


def planner(
    draws: Annotated[int, typer.Option("--draws", min=1, help="Requests per cell of the grid.")] = 3,
    noise: Annotated[
        float, typer.Option("--noise", min=0.0, help="Spread of measured prefills; of reads five times.")
    ] = 0.05,
    measured: Annotated[
        bool,
        typer.Option("--measured", help="Instead: time auto against always on this machine (a few minutes)."),
    ] = False,
    seed: Seed = 0,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """How often the planner takes the quicker way, over simulated tiers and models."""
    from benchmarks.planner import run as module
    from ragcachekit.commands.bench.report import table

    if measured:
        _measured(seed, json)
        return
    report = module.run(draws=draws, noise=noise, seed=seed)
    show(table("By policy", module.summary(report, ("policy",))))
    show(table("By bandwidth", module.summary(report, ("bandwidth_mb_s",))))
    show(table("By latency", module.summary(report, ("latency_ms",))))
    show(table("By chunks in the prompt", module.summary(report, ("chunks",))))
    show(table("All", module.summary(report)))
    written(report, json, plot, module.plot)


def _measured(seed: int, json: Path | None) -> None:
    from benchmarks.planner import measured as planner_measured

    report = planner_measured.run(seed=seed)
    show(report.table("TTFT with load=auto against load=always, from disk"))
    written(report, json)
