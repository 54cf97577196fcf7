"""query-cache and query-cache-lookup."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ragcachekit.commands import options as opt
from ragcachekit.commands.console import quiet_loading, show, written


def query_cache(
    log: Annotated[
        Path | None, typer.Option("--log", help="Questions, as for `ragcachekit estimate`.")
    ] = None,
    corpus: Annotated[
        str | None, typer.Option(callback=opt.check_corpus, help="The folder that they are asked about.")
    ] = None,
    dataset: opt.Dataset = None,
    count: Annotated[int, typer.Option(min=1, help="Questions drawn from the dataset.")] = 131,
    wordings: Annotated[int, typer.Option(min=1, max=10, help="Of each question of the dataset.")] = 4,
    vectors: Annotated[int, typer.Option(min=0, help="Fill the index up to these with noisy copies.")] = 0,
    index: Annotated[str, typer.Option(help="faiss-flat, faiss-hnsw or brute.")] = "faiss-flat",
    capacities: Annotated[
        str | None, typer.Option(help="With commas; default: a tenth, half, all of the questions.")
    ] = None,
    tolerances: Annotated[str, typer.Option(help="Cosine distances, with commas.")] = "0,0.02,0.05,0.1",
    eviction: Annotated[str, typer.Option(help="fifo or lru.")] = "fifo",
    passes: Annotated[int, typer.Option(min=1, help="How often all of it is asked.")] = 1,
    guard: Annotated[bool, typer.Option(help="Refuse hits on questions that only look alike.")] = True,
    reorder: Annotated[bool, typer.Option(help="Order candidates anew for each question.")] = True,
    chunk_tokens: opt.ChunkTokens = 200,
    seed: opt.Seed = 0,
    json: opt.Json = None,
    plot: opt.Plot = None,
) -> None:
    """Hit rates, search time saved and recall of the query cache, over a log or a dataset."""
    from benchmarks.query_cache import hits, workload

    if (dataset is None) == (log is None) or (log is None) != (corpus is None):
        raise ValueError("give --log with --corpus, or --dataset")
    sizes = tuple(int(size) for size in opt.numbers("--capacities", capacities or ""))
    sweep = hits.Sweep(sizes, opt.numbers("--tolerances", tolerances), eviction, passes, guard, reorder)
    quiet_loading()
    if log is not None and corpus is not None:
        asked = workload.of_log(log, corpus, chunk_tokens, progress=True)
    else:
        drawn = {"wordings": wordings, "vectors": vectors, "seed": seed}
        asked = workload.of_dataset(dataset or "", count, **drawn, progress=True)
    report = hits.run(asked, sweep, index, progress=True)
    show(report.part(hits.SWEEP).table(f"Hit rate and recall: {report.model}"))
    written(report, json, plot, hits.plot)


def query_cache_lookup(
    capacities: Annotated[
        str, typer.Option("--capacities", help="With commas between; 1000000 takes half an hour and 10 GiB.")
    ] = "300,1000,10000",
    metrics: Annotated[str, typer.Option("--metrics", help="With commas between.")] = "cosine,l2,ip",
    dim: Annotated[int, typer.Option("--dim", min=1, help="Width of the embeddings.")] = 768,
    lookups: Annotated[int, typer.Option("--lookups", min=1, help="Timed lookups of each kind.")] = 1000,
    seed: opt.Seed = 0,
    json: opt.Json = None,
) -> None:
    """Lookup times of a full query cache by capacity, metric and kind, and the recall of its hits."""
    from benchmarks.query_cache import lookups as module

    settings = module.LookupSettings(
        capacities=tuple(int(capacity) for capacity in opt.numbers("--capacities", capacities)),
        metrics=opt.names(metrics),
        dim=dim,
        lookups=lookups,
        seed=seed,
    )
    report = module.run(settings, progress=True)
    show(report.table("One lookup, in microseconds (median, 10th and 90th percentile)"))
    written(report, json)
