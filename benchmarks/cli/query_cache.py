"""query-cache-lookup: how long a lookup takes."""

from __future__ import annotations

from typing import Annotated

import typer

from ragcachekit.cli.console import show, written
from ragcachekit.cli.options import Json, Seed, names, numbers


def query_cache_lookup(
    capacities: Annotated[
        str, typer.Option("--capacities", help="With commas between; 1000000 takes half an hour and 10 GiB.")
    ] = "300,1000,10000",
    metrics: Annotated[str, typer.Option("--metrics", help="With commas between.")] = "cosine,l2,ip",
    dim: Annotated[int, typer.Option("--dim", min=1, help="Width of the embeddings.")] = 768,
    lookups: Annotated[int, typer.Option("--lookups", min=1, help="Timed lookups of each kind.")] = 1000,
    seed: Seed = 0,
    json: Json = None,
) -> None:
    """Lookup times of a full query cache by capacity, metric and kind, and the recall of its hits."""
    from benchmarks import query_cache as module

    settings = module.LookupSettings(
        capacities=tuple(int(capacity) for capacity in numbers("--capacities", capacities)),
        metrics=names(metrics),
        dim=dim,
        lookups=lookups,
        seed=seed,
    )
    report = module.run(settings, progress=True)
    show(report.table("One lookup, in microseconds (median, 10th and 90th percentile)"))
    written(report, json)
