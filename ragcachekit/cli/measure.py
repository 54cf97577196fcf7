"""check-model, bench ttft and bench query-cache: what a user measures on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ragcachekit.cli import options as opt
from ragcachekit.cli.console import note, pairs, put, quiet_loading, show, written
from ragcachekit.cli.moved import moved

if TYPE_CHECKING:
    from ragcachekit.commands.bench.report import BenchReport


def check_model(
    model: Annotated[str | None, typer.Argument(help="Folder of a Hugging Face model, or a hub id.")] = None,
    all_families: Annotated[bool, typer.Option("--all-families", hidden=True)] = False,
    markdown: Annotated[Path | None, typer.Option("--markdown", hidden=True)] = None,
    json: opt.Json = None,
    device: opt.Device = None,
    dtype: opt.Dtype = "auto",
) -> None:
    """Check whether chunk KV can be reused on a model without changing what it computes.

    Ends with 0 if it can (status exact), with 1 if the model is refused or the check found a difference.
    """
    if all_families or markdown:
        raise moved("families")
    chosen = opt.model_given(model)
    quiet_loading()
    from ragcachekit.commands import check_model as module

    checked = module.run(chosen, device=device, dtype=dtype)
    written(module.report(checked, chosen), json)
    rows = {"family": checked.family, "status": checked.status, "reason": checked.reason}
    if checked.max_abs_diff is not None:
        rows["max difference"] = (
            f"{checked.max_abs_diff:.2g} of the largest value, allowed {checked.tolerance:.0e}"
        )
    put(pairs({**rows, "rotary embedding": "\n".join(checked.rope)}))
    raise typer.Exit(0 if checked.exact else 1)


def ttft(
    shape: Annotated[
        str | None,
        typer.Option(
            "--shape",
            help="Random weights: smollm2-135m (default), qwen2.5-0.5b, llama-3.1-8b; tiny, to try it out.",
        ),
    ] = None,
    model: opt.ModelName = None,
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", min=1, help="Of the whole prompt.")] = 2048,
    chunk_tokens: Annotated[int, typer.Option("--chunk-tokens", min=1, help="Of each chunk, about.")] = 490,
    question_tokens: Annotated[int, typer.Option("--question-tokens", min=1)] = 64,
    policies: Annotated[str, typer.Option("--policies", help="With commas between.")] = "full,lego:16,reuse",
    tiers: Annotated[
        str, typer.Option("--tiers", help="Where the KV lies: gpu, host, disk, disk-cold.")
    ] = "host",
    dtype: Annotated[str, typer.Option("--dtype", help="float32, bfloat16, float16.")] = "float32",
    runs: Annotated[int, typer.Option("--runs", min=1, help="Rounds; the median counts.")] = 5,
    device: opt.DeviceOrCpu = "cpu",
    seed: opt.Seed = 0,
    json: opt.Json = None,
    plot: opt.Plot = None,
) -> None:
    """Time to first token of one long prompt, in every way, beside a check that the answers agree."""
    from ragcachekit.commands.bench import ttft as module

    quiet_loading()
    report = module.run(
        shape=shape,
        model=None if model is None else opt.model_given(model),
        prompt_tokens=prompt_tokens,
        chunk_tokens=chunk_tokens,
        question_tokens=question_tokens,
        policies=opt.names(policies),
        tiers=opt.names(tiers),
        dtype=dtype,
        runs=runs,
        device=device,
        seed=seed,
    )
    show(report.table(f"Time to first token: {report.model}"))
    written(report, json, plot, module.plot)


def query_cache(
    log: Annotated[
        Path | None, typer.Option("--log", help="Your questions, one per line, as for `estimate`.")
    ] = None,
    corpus: Annotated[
        Path | None, typer.Option("--corpus", help="With --log: the folder that they are asked about.")
    ] = None,
    chunk_tokens: opt.ChunkTokens = 200,
    lookups: Annotated[int, typer.Option("--lookups", min=1, help="Timed lookups of each kind.")] = 2000,
    questions: Annotated[int, typer.Option("--questions", hidden=True)] = 0,
    seed: opt.Seed = 0,
    json: opt.Json = None,
    plot: opt.Plot = None,
) -> None:
    """Lookup times at 300 and 1,000 entries, the wrapper's overhead, hit rates of your own questions."""
    if questions:  # what it meant before: so many about the sample world
        raise moved("query-cache")
    if (log is None) != (corpus is None):
        raise ValueError("hit rates need both --log with your questions and --corpus with your documents")
    opt.check_folders(corpus, None)
    if log is None and plot is not None:
        raise ValueError("there is no sweep to draw: give --log and --corpus")
    from ragcachekit.commands.bench import query_cache_report as module

    quiet_loading()
    found = None
    if log is not None and corpus is not None:
        from ragcachekit.commands.own_workload import workload  # its embedding model is an extra

        found = workload(log, corpus, chunk_tokens, progress=True)
    else:
        note("no hit rates: give --log with your questions and --corpus with your documents for them")
    report = module.measure(found, lookups=lookups, seed=seed)
    show_query_cache(report)
    written(report, json, plot, module.plot)


def show_query_cache(report: BenchReport) -> None:
    """One table per part."""
    from ragcachekit.commands.bench import query_cache_report as module

    titles = {
        module.LOOKUP: "One lookup, in microseconds (median, least, greatest)",
        module.WRAPPER: "What the retriever wrapper adds to an uncached call, embedding aside",
        module.SWEEP: f"Hit rate and recall: {report.model}",
    }
    for name, title in titles.items():
        if (part := module.part(report, name)).rows:
            show(part.table(title))
