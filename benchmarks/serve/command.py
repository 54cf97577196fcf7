"""serve: many requests at once."""

from __future__ import annotations

from typing import Annotated

import typer

from benchmarks.output import Plot, written
from ragcachekit.commands import options as opt
from ragcachekit.commands.console import quiet_loading, show


def serve(
    shape: Annotated[
        str | None, typer.Option(help="Random weights: smollm2-135m (default); tiny, to try it out.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="A folder, a hub id or 'sample', instead.")] = None,
    dataset: Annotated[
        str | None, typer.Option(help="Cut documents from squad:FILE, musique:FILE, ...; needs --model.")
    ] = None,
    corpus: Annotated[
        str | None, typer.Option(help="Cut documents from this folder; else they are random tokens.")
    ] = None,
    systems: Annotated[
        str,
        typer.Option(
            help="With commas: sequential (one generate after the other), batching (transformers' continuous "
            "batching), sharing (that with shared prefixes), and policies, which run through rag.submit."
        ),
    ] = "sequential,batching,sharing,full,prefix,auto",
    orders: Annotated[
        str, typer.Option(help="Of waiting requests, with commas: cache-aware, fifo.")
    ] = "cache-aware",
    budget: Annotated[float, typer.Option(min=0.0, help="Of the chunk KV, in sizes of the documents.")] = 4.0,
    rates: Annotated[
        str | None,
        typer.Option(
            help="Requests per second, with commas; default: 0.5, 1 and 2 times what sequential answers. "
            "All at once is always measured; none: only that."
        ),
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="At each rate.")] = 24,
    documents: Annotated[int, typer.Option(min=1, help="That requests draw from.")] = 64,
    chunks: Annotated[int, typer.Option(min=1, help="Documents per request.")] = 5,
    chunk_tokens: Annotated[int, typer.Option(min=1, help="Of each document.")] = 190,
    max_new_tokens: opt.MaxNewTokens = 32,
    alpha: Annotated[float, typer.Option(min=0.0, help="Zipf exponent: how unequal documents are.")] = 1.0,
    warm_up: Annotated[int, typer.Option(min=1, help="Requests before the measured ones.")] = 8,
    max_batch: Annotated[int, typer.Option(min=1, help="Requests that decode together.")] = 16,
    max_waiting: Annotated[int, typer.Option(min=1, help="Our queue refuses requests beyond these.")] = 256,
    deadline: Annotated[
        float | None,
        typer.Option(min=0.001, help="Seconds to a first token; default: 5 times sequential's."),
    ] = None,
    runs: Annotated[int, typer.Option(min=1, help="Repeats, each with requests of its own.")] = 1,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    device: opt.DeviceOrCpu = "cpu",
    seed: opt.Seed = 0,
    json: opt.Json = None,
    plot: Plot = None,
) -> None:
    """Many requests at once: latency and throughput over request rates, beside transformers' own batching.

    Requests arrive at random (Poisson) and draw their documents by Zipf's law. Every system gets the same
    ones. ttft is the time to the first token, tbt that between tokens (ms); throughput and goodput (first
    token within the deadline) are answers per second. Exact systems must give the answers of sequential, or
    no figure is shown. Takes about an hour on one core with the sample model.
    """
    from benchmarks.serve import run as module

    quiet_loading()
    settings = opt.settings_of(
        module.ServeSettings,
        locals(),
        systems=opt.names(systems),
        orders=opt.names(orders),
        rates=() if rates == "none" else opt.numbers("--rates", rates) if rates else None,
    )
    report = module.run(settings, progress=True)
    show(report.table(f"Serving: {report.model}", module.COLUMNS))
    written(report, json, plot, module.plot)
