"""bench fidelity: what reuse does to answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ragcachekit.cli import options as opt
from ragcachekit.cli.console import INTERRUPTED, note, quiet_loading, show, written
from ragcachekit.cli.moved import moved

if TYPE_CHECKING:
    from rich.table import Table

    from ragcachekit.commands.bench.report import BenchReport

Neighbours = Annotated[
    str,
    typer.Option("--neighbours", help="Of similar:n: embedding (all-MiniLM) or document (chunks before)."),
]


def fidelity(
    model: opt.ModelName = None,
    questions: opt.QuestionsFile = None,
    corpus: opt.ProbedCorpus = None,
    policies: opt.Policies = None,
    encoders: opt.Encoders = "standalone",
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
    sweep: Annotated[str | None, typer.Option("--sweep", hidden=True)] = None,
    questions_per_type: Annotated[int | None, typer.Option("--questions-per-type", hidden=True)] = None,
) -> None:
    """What reuse does to answers: every policy over every encoder, beside a full prefill.

    Answers to probes that are made of a corpus are to be read by their agreement with full.
    """
    if sweep or questions_per_type:
        raise moved("fidelity")
    chosen = opt.model_given(model)
    opt.check_questions(questions)
    opt.check_folders(corpus, cache)
    from ragcachekit.commands.bench.fidelity import run as module
    from ragcachekit.commands.bench.fidelity.plot import plot as draw
    from ragcachekit.commands.bench.fidelity.report import tables
    from ragcachekit.commands.bench.fidelity.settings import FidelitySettings

    quiet_loading()
    lists = {"policies": opt.names(policies), "encoders": opt.names(encoders)}
    settings = opt.settings_of(FidelitySettings, locals(), model=chosen, cache_dir=cache, **lists)
    resumed(lambda work: module.run(settings, work=work, progress=True), tables, draw, resume, json, plot)


def resumed(
    run: Callable[[Path | None], BenchReport],
    tables: Callable[[BenchReport], Iterator[Table]],
    draw: Callable[[BenchReport, Path], object],
    resume: Path | None,
    json: Path | None,
    plot: Path | None,
) -> None:
    """Run with a work file, so that an interrupted command goes on; show and write the report."""
    beside = json.with_name(json.name + ".work") if json is not None else None
    try:
        report = run(resume or beside)
    except KeyboardInterrupt:
        if resume or beside:
            note(f"interrupted; the results so far are in {resume or beside}, the same command goes on")
        raise typer.Exit(INTERRUPTED) from None
    for table in tables(report):
        show(table)
    written(report, json, plot, draw)
    if beside is not None and resume is None:
        beside.unlink()
