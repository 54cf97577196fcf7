"""eviction: which entries a cache should let go of."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress

from ragcachekit.commands.console import errors, note, show, written
from ragcachekit.commands.options import Json, Plot, names, numbers


def eviction(
    traces: Annotated[
        str | None,
        typer.Option("--traces", help="With commas between: zipf, zipf-equal, local, shifting, scan."),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace", help='Your own, JSONL: {"docs": ["id", ...]} or {"docs": [{"id":, "tokens":}, ...]}.'
        ),
    ] = None,
    policies: Annotated[
        str | None,
        typer.Option("--policies", help="With commas between: lru, lfu, gdsf, pgdsf:20000, f_r, ..."),
    ] = None,
    sizes: Annotated[
        str | None, typer.Option("--sizes", help="Capacities as shares of all documents' tokens: 0.01,0.04.")
    ] = None,
    structure: Annotated[
        str, typer.Option("--structure", help="tree (exact prefixes), chunks (any place), or both.")
    ] = "tree,chunks",
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Drawn traces of each kind.")] = 5,
    seed: Annotated[int, typer.Option("--seed", help="The first of them.")] = 0,
    documents: Annotated[int, typer.Option("--documents", min=1)] = 2000,
    requests: Annotated[int, typer.Option("--requests", min=1)] = 4000,
    top_k: Annotated[int, typer.Option("--top-k", min=1, help="Documents per request.")] = 2,
    tokens: Annotated[
        int,
        typer.Option("--tokens", min=1, help="Mean size of a document; with --trace, of those without one."),
    ] = 3718,
    profile: Annotated[
        str, typer.Option("--profile", help="llama-3.1-8b, smollm2-135m, or a measured profile's JSON file.")
    ] = "llama-3.1-8b",
    tiers: Annotated[bool, typer.Option("--tiers/--no-tiers", help="Also PGDSF over GPU and host.")] = True,
    product: Annotated[
        bool, typer.Option("--product", help="Also by a store and a tree as the product opens them.")
    ] = False,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """Replay requests against every eviction policy and Belady's bound."""
    if trace is not None and traces is not None:
        raise ValueError("give --trace FILE or --traces NAMES, not both")
    from benchmarks.eviction import report as eviction_report
    from benchmarks.eviction import run as module
    from benchmarks.eviction.traces import TRACES, TraceShape

    settings = module.EvictionSettings(
        traces=names(traces) if traces is not None else tuple(TRACES),
        file=trace,
        policies=names(policies) if policies is not None else module.POLICIES,
        shares=numbers("--sizes", sizes) if sizes is not None else module.SHARES,
        structures=names(structure),
        seeds=seeds,
        seed=seed,
        tiers=tiers,
        product=product,
        profile=profile,
        shape=TraceShape(documents, requests, top_k, tokens),
    )
    with Progress(console=errors(), transient=True) as progress:
        task = progress.add_task("replaying", total=module.steps(settings))
        report = module.run(settings, lambda done: progress.advance(task, done))
    for table in eviction_report.tables(report):
        show(table)
    if found := eviction_report.verdict(report):
        note(found)
    written(report, json, plot, eviction_report.plot)
