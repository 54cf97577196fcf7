"""bench serve: many requests at once."""

from __future__ import annotations

from typing import Annotated

import typer

from ragcachekit.cli import options as opt
from ragcachekit.cli.console import quiet_loading, show, written

COLUMNS = (
    *("system", "cache", "order", "rate", "ttft_ms", "ttft_ms_p50", "ttft_ms_p99"),
    *("tbt_ms_p50", "tbt_ms_p99", "throughput", "speedup", "goodput", "hit_rate", "refused", "same"),
)


def serve(
    shape: Annotated[
        str | None,
        typer.Option(help="Random weights: smollm2-135m (default), qwen2.5-0.5b; tiny, to try it out."),
    ] = None,
    model: opt.OptionalModel = None,
    dataset: Annotated[
        str | None, typer.Option(help="Cut documents from squad:FILE, musique:FILE, ...; needs --model.")
    ] = None,
    corpus: Annotated[
        str | None,
        typer.Option(
            callback=opt.check_corpus, help="Cut documents from this folder; else they are random tokens."
        ),
    ] = None,
    systems: Annotated[
        str,
        typer.Option(
            help="With commas: sequential (generate, one after the other; also measured where rates come "
            "from it or it checks an exact system), batching (transformers' continuous batching), sharing "
            "(that with shared prefixes), and policies, which run through rag.submit."
        ),
    ] = "sequential,batching,sharing,full,prefix,auto",
    caches: Annotated[
        str, typer.Option(help="Of policies, with commas: warm (holds all documents), half (half of them).")
    ] = "warm",
    orders: Annotated[
        str, typer.Option(help="Of waiting requests, with commas: cache-aware, fifo.")
    ] = "cache-aware",
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
        typer.Option(help="Seconds to a first token that count as in time; default: 5 times sequential's."),
    ] = None,
    runs: Annotated[int, typer.Option(min=1, help="Repeats, each with requests of its own.")] = 1,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    device: opt.DeviceOrCpu = "cpu",
    seed: opt.Seed = 0,
    json: opt.Json = None,
    plot: opt.Plot = None,
) -> None:
    """Many requests at once: latency and throughput over request rates, beside transformers' own batching.

    Requests arrive at random (Poisson) and draw their documents by Zipf's law. Every system gets the same
    ones. ttft is the time to the first token, tbt that between tokens (ms); throughput and goodput (first
    token within the deadline) are answers per second. A missing rate is "all at once": the greatest
    throughput. Exact systems must give the answers of sequential, or no figure is shown.

    Takes about an hour on one core with the sample model. To try it out:

        ragcachekit bench serve --shape tiny --requests 8 --documents 10 --chunk-tokens 20
    """
    from ragcachekit.commands.bench.serve import plot as picture
    from ragcachekit.commands.bench.serve import run as module
    from ragcachekit.commands.bench.serve.settings import ServeSettings

    quiet_loading()
    lists = {"systems": opt.names(systems), "caches": opt.names(caches), "orders": opt.names(orders)}
    settings = opt.settings_of(
        ServeSettings,
        locals(),
        **lists,
        rates=() if rates == "none" else opt.numbers("--rates", rates) if rates else None,
        new_tokens=max_new_tokens,
    )
    report = module.run(settings, progress=True)
    show(report.table(f"Serving: {report.model}", COLUMNS))
    written(report, json, plot, picture.plot)
