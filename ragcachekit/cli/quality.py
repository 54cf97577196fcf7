"""calibrate and the fidelity bench: what reuse does to the answers of a user's own model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ragcachekit.cli import options as opt
from ragcachekit.cli.console import INTERRUPTED, note, quiet_loading, show, written

if TYPE_CHECKING:
    from rich.table import Table

    from ragcachekit.commands.bench.report import BenchReport

Neighbours = Annotated[
    str, typer.Option(help="Of similar:n: embedding (all-MiniLM) or document (chunks before).")
]
Dataset = Annotated[str | None, typer.Option(help="squad:FILE, musique:FILE, longbench:FILE or jsonl:FILE.")]


def calibrate(
    model: opt.Model = "",
    questions: opt.QuestionsFile = None,
    corpus: opt.OptionalCorpus = None,
    encoder: Annotated[str, typer.Option(help="standalone, similar:1, ...")] = "standalone",
    neighbours: Neighbours = "document",
    quality: Annotated[
        str,
        typer.Option(help="What may be lost: kl, gold-loss (nats per token), f1 (share)."),
    ] = "kl",
    budget: Annotated[float, typer.Option(help="How much of it, on average over questions.")] = 0.1,
    policies: opt.Policies = None,
    namespace: opt.Namespace = "default",
    probes: opt.Probes = 30,
    chunk_tokens: opt.ChunkTokens = 200,
    cache: opt.CacheDir = None,
    seed: opt.Seed = 0,
    max_new_tokens: opt.MaxNewTokens = 24,
    device: opt.Device = None,
    dtype: opt.Dtype = "auto",
    json: opt.Json = None,
) -> None:
    """Find the cheapest policy that surely loses no more than a budget, and store it for policy="budget:x".

    Questions need no right answers for kl, which compares with full's own answers.
    """
    from ragcachekit.commands import calibrate as module

    quiet_loading()
    settings = opt.settings_of(
        module.CalibrateSettings, locals(), policies=opt.names(policies), cache_dir=cache
    )
    record, report = module.run(settings, progress=True)
    columns = ("policy", "ratio_spent", "n", "loss", "upper", "kl", "gold_loss", "decision")
    show(report.table(f"Loss against full: {record.quality}, up to {record.n} {record.sample}", columns))
    typer.echo(module.summary(record))
    note(f"stored for namespace {record.namespace!r} in {settings.folder}")
    written(report, json)


def fidelity(
    model: opt.Model = "",
    questions: opt.QuestionsFile = None,
    corpus: opt.OptionalCorpus = None,
    policies: opt.Policies = None,
    encoders: opt.Encoders = "standalone",
    dataset: Dataset = None,
    count: Annotated[int, typer.Option(min=1, help="Questions drawn from the dataset.")] = 50,
    distractors: Annotated[int, typer.Option(min=0, help="Passages beside the relevant ones.")] = 3,
    order: Annotated[str, typer.Option(help="Of passages: shuffled or given.")] = "shuffled",
    half: Annotated[str, typer.Option(help="Of the dataset: all, develop or report.")] = "all",
    prompt: Annotated[str, typer.Option(help="ask (as the command does) or few-shot.")] = "ask",
    neighbours: Neighbours = "embedding",
    probes: opt.Probes = 200,
    chunk_tokens: opt.ChunkTokens = 200,
    seed: opt.Seed = 0,
    max_new_tokens: opt.MaxNewTokens = 64,
    cache: opt.CacheDir = None,
    device: opt.Device = None,
    dtype: opt.Dtype = "auto",
    resume: opt.Resume = None,
    json: opt.Json = None,
    plot: opt.Plot = None,
) -> None:
    """What reuse does to answers: every policy over every encoder, beside a full prefill.

    Answers to probes that are made of a corpus are to be read by their agreement with full.
    """
    from ragcachekit.commands.bench import fidelity as module
    from ragcachekit.commands.bench.fidelity_rows import plot as draw
    from ragcachekit.commands.bench.fidelity_rows import tables
    from ragcachekit.commands.datasets import Sampling

    quiet_loading()
    lists: dict[str, object] = {"policies": opt.names(policies), "encoders": opt.names(encoders)}
    lists["sampling"] = Sampling(count, distractors, order, half, seed)
    settings = opt.settings_of(module.FidelitySettings, locals(), cache_dir=cache, **lists)
    report = resumed(lambda work: module.run(settings, work=work, progress=True), tables, resume, json)
    if plot is not None:
        draw(report, plot)


def resumed(
    run: Callable[[Path | None], BenchReport],
    tables: Callable[[BenchReport], Iterator[Table]],
    resume: Path | None,
    json: Path | None,
) -> BenchReport:
    """Run with a work file, so that an interrupted command can continue; show and write the report."""
    beside = json.with_name(json.name + ".work") if json is not None else None
    try:
        report = run(resume or beside)
    except KeyboardInterrupt:
        if resume or beside:
            note(f"interrupted; the results so far are in {resume or beside}, the same command goes on")
        raise typer.Exit(INTERRUPTED) from None
    for table in tables(report):
        show(table)
    written(report, json)
    if beside is not None and resume is None:
        beside.unlink()
    return report
