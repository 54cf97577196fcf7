"""bench fidelity: what reuse does to answers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ragcachekit.cli.console import note, quiet_loading, show
from ragcachekit.cli.options import Device, Dtype, Json, Plot, check_questions, names

if TYPE_CHECKING:
    from ragcachekit.bench.report import BenchReport

INTERRUPTED = 130


def fidelity(
    model: Annotated[
        str, typer.Option("--model", help="Folder of a Hugging Face model, a hub id, or 'reader'.")
    ] = "reader",
    questions: Annotated[
        Path | None,
        typer.Option(
            "--questions",
            help='JSONL, per line {"question", "chunks", "answer"}; default: the sample world.',
        ),
    ] = None,
    policies: Annotated[
        str | None, typer.Option("--policies", help="With commas between, e.g. lego:16,query:0.1.")
    ] = None,
    encoders: Annotated[
        str,
        typer.Option(
            "--encoders",
            help="With commas between: standalone, sinks:4, system, ...; standalone+int8: rounded.",
        ),
    ] = "standalone",
    neighbours: Annotated[
        str,
        typer.Option(
            "--neighbours",
            help="Of similar:n: embedding (all-MiniLM-L6-v2) or document (what stands before it there).",
        ),
    ] = "embedding",
    questions_per_type: Annotated[
        int | None,
        typer.Option(
            "--questions-per-type", min=1, help="About the sample world; default 100, in a sweep 20."
        ),
    ] = None,
    sweep: Annotated[
        str | None,
        typer.Option("--sweep", help="needle: place of the evidence; chunks: their number and size."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the sample world and the intervals.")] = 0,
    max_new_tokens: Annotated[
        int | None, typer.Option("--max-new-tokens", min=1, help="Default 16 for the reader, else 64.")
    ] = None,
    device: Device = None,
    dtype: Dtype = "auto",
    resume: Annotated[
        Path | None,
        typer.Option(
            "--resume",
            help="Keep every result in this file and go on from it; default: beside --json until done.",
        ),
    ] = None,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """What reuse does to answers: every policy over every encoder, beside a full prefill."""
    check_questions(questions)
    from ragcachekit.bench import fidelity as module
    from ragcachekit.bench.fidelity_plot import plot as draw
    from ragcachekit.bench.fidelity_settings import FidelitySettings

    quiet_loading()
    settings = FidelitySettings(
        model=model,
        policies=names(policies) if policies is not None else (),
        encoders=names(encoders),
        neighbours=neighbours,
        questions=questions,
        per_type=questions_per_type,
        seed=seed,
        sweep=sweep,
        max_new_tokens=max_new_tokens,
        device=device,
        dtype=dtype,
    )
    beside = json.with_name(json.name + ".work") if json is not None else None
    try:
        report = module.run(settings, work=resume or beside, progress=True)
    except KeyboardInterrupt:
        if resume or beside:
            note(f"interrupted; the results so far are in {resume or beside}, the same command goes on")
        raise typer.Exit(INTERRUPTED) from None
    _show(report)
    if json is not None:
        report.write_json(json)
    if plot is not None:
        draw(report, plot)
    if beside is not None and resume is None:
        beside.unlink()


def _show(report: BenchReport) -> None:
    from ragcachekit.bench import fidelity_report

    for table in fidelity_report.tables(report):
        show(table)
