"""``ragcachekit bench ttft``: the time to the first token of one long prompt, in every way."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from ragcachekit.commands import options as opt
from ragcachekit.commands.console import quiet_loading, show, written

if TYPE_CHECKING:
    from ragcachekit.commands.bench.report import BenchReport


def ttft(
    shape: Annotated[
        str | None,
        typer.Option(
            help="Random weights: smollm2-135m (default), qwen2.5-0.5b, llama-3.1-8b; tiny, to try it out."
        ),
    ] = None,
    model: opt.OptionalModel = None,
    corpus: Annotated[
        str | None,
        typer.Option(callback=opt.check_corpus, help="Documents for --model; else random tokens."),
    ] = None,
    prompt_tokens: Annotated[str, typer.Option(help="Of the whole prompt; sizes with commas.")] = "2048",
    chunk_tokens: Annotated[int, typer.Option(min=1, help="Of each chunk, about.")] = 490,
    question_tokens: Annotated[int, typer.Option(min=1)] = 64,
    policies: Annotated[str, typer.Option(help="With commas between.")] = "full,lego:16,reuse",
    encoder: opt.Encoder = None,
    tiers: Annotated[str, typer.Option(help="Where the KV lies: gpu, host, disk, disk-cold.")] = "host",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16; with commas.")] = "float32",
    runs: Annotated[int, typer.Option(min=1, help="Rounds; the median counts.")] = 5,
    device: opt.DeviceOrCpu = "cpu",
    seed: opt.Seed = 0,
    json: opt.Json = None,
    plot: opt.Plot = None,
) -> None:
    """Time to first token of one long prompt, in every way, beside a check that the answers agree."""
    quiet_loading()
    from ragcachekit.commands.bench import timing

    settings = opt.settings_of(
        timing.TtftSettings,
        locals(),
        prompt_tokens=[int(count) for count in opt.numbers("--prompt-tokens", prompt_tokens)],
        policies=opt.names(policies),
        tiers=opt.names(tiers),
        dtypes=opt.names(dtype),
    )
    report = timing.run(settings, progress=True)
    show(report.table(f"Time to first token: {report.model}"))
    written(report, json, plot, draw)


def draw(report: BenchReport, path: str | os.PathLike[str]) -> None:
    """Draw the rows as bars, with the range from least to greatest."""
    from matplotlib.figure import Figure  # not pyplot, which keeps figures in a global list

    bars = report.rows
    below = [r["ttft_ms"] - r["ttft_ms_min"] for r in bars]
    above = [r["ttft_ms_max"] - r["ttft_ms"] for r in bars]
    figure = Figure(figsize=(1.5 + 1.1 * len(bars), 4), layout="constrained")
    axes = figure.add_subplot()
    drawn = axes.bar(range(len(bars)), [r["ttft_ms"] for r in bars], yerr=[below, above], capsize=3)
    axes.bar_label(drawn, [f"{r['speedup']:.1f}x" for r in bars], padding=2)
    axes.set_xticks(range(len(bars)), [f"{r['policy']}\n{r['tier']}\n{r['dtype']}" for r in bars])
    axes.set_ylabel("time to first token (ms)")
    axes.set_title(f"{report.model}, {bars[0]['prompt_tokens']} prompt tokens", fontsize=9)
    figure.savefig(path)
