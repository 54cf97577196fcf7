"""bench fidelity: what reuse does to answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ragcachekit.cli.console import INTERRUPTED, note, quiet_loading, show, written
from ragcachekit.cli.options import (
    CacheDir,
    ChunkTokens,
    Device,
    Dtype,
    Encoders,
    Json,
    MaxNewTokens,
    ModelName,
    Plot,
    Policies,
    ProbedCorpus,
    Probes,
    QuestionsFile,
    Resume,
    Seed,
    check_folders,
    check_questions,
    model_given,
    names,
)

if TYPE_CHECKING:
    from rich.table import Table

    from ragcachekit.bench.report import BenchReport

Neighbours = Annotated[
    str,
    typer.Option(
        "--neighbours",
        help="Of similar:n: embedding (all-MiniLM-L6-v2) or document (what stands before it there).",
    ),
]


def fidelity(
    model: ModelName = None,
    questions: QuestionsFile = None,
    corpus: ProbedCorpus = None,
    policies: Policies = None,
    encoders: Encoders = "standalone",
    neighbours: Neighbours = "embedding",
    probes: Probes = 200,
    chunk_tokens: ChunkTokens = 200,
    seed: Seed = 0,
    max_new_tokens: MaxNewTokens = 64,
    cache: CacheDir = None,
    device: Device = None,
    dtype: Dtype = "auto",
    resume: Resume = None,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """What reuse does to answers: every policy over every encoder, beside a full prefill.

    Answers to probes that are made of a corpus are to be read by their agreement with full.
    """
    chosen = model_given(model)
    check_questions(questions)
    check_folders(corpus, cache)
    from ragcachekit.bench import fidelity as module
    from ragcachekit.bench.fidelity_plot import plot as draw
    from ragcachekit.bench.fidelity_report import tables
    from ragcachekit.bench.fidelity_settings import FidelitySettings

    quiet_loading()
    settings = FidelitySettings(
        model=chosen,
        policies=names(policies),
        encoders=names(encoders),
        neighbours=neighbours,
        questions=questions,
        corpus=corpus,
        probes=probes,
        chunk_tokens=chunk_tokens,
        seed=seed,
        max_new_tokens=max_new_tokens,
        device=device,
        dtype=dtype,
        cache_dir=cache,
    )
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
