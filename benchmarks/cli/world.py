"""fidelity and budget: the reader over the sample world."""

from __future__ import annotations

from typing import Annotated

import typer

from benchmarks.world.reader_folder import READER
from ragcachekit.commands.console import quiet_loading, resumed, show, written
from ragcachekit.commands.options import (
    Device,
    Dtype,
    Encoders,
    Json,
    Neighbours,
    Plot,
    Policies,
    Resume,
    Seed,
    names,
    numbers,
)


def fidelity(
    model: Annotated[str, typer.Option("--model", help="Folder or hub id; default: the reader.")] = READER,
    policies: Policies = None,
    encoders: Encoders = "standalone",
    neighbours: Neighbours = "embedding",
    questions_per_type: Annotated[
        int | None, typer.Option("--questions-per-type", min=1, help="Default 100, in a sweep 20.")
    ] = None,
    sweep: Annotated[
        str | None,
        typer.Option("--sweep", help="needle: place of the evidence; chunks: their number and size."),
    ] = None,
    seed: Seed = 0,
    max_new_tokens: Annotated[
        int | None, typer.Option("--max-new-tokens", min=1, help="Default 16 for the reader, else 64.")
    ] = None,
    device: Device = None,
    dtype: Dtype = "auto",
    resume: Resume = None,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """What reuse does to answers about the sample world, with sweeps of place, number and size of chunks."""
    from benchmarks.world import fidelity as module
    from benchmarks.world.sweeps_report import plot as draw
    from benchmarks.world.sweeps_report import tables

    quiet_loading()
    settings = module.WorldFidelitySettings(
        model=model,
        policies=names(policies),
        encoders=names(encoders),
        neighbours=neighbours,
        per_type=questions_per_type,
        seed=seed,
        sweep=sweep,
        max_new_tokens=max_new_tokens or (16 if model == READER else 64),
        device=device,
        dtype=dtype,
    )
    report = resumed(lambda work: module.run(settings, work=work, progress=True), tables, resume, json)
    if plot is not None:
        draw(report, plot)


def budget(
    budgets: Annotated[str, typer.Option("--budgets", help="With commas between.")] = "0.05,0.1,0.2,0.4",
    encoders: Encoders = "standalone,similar:1",
    policies: Policies = None,
    questions: Annotated[int, typer.Option(min=1, help="Asked of every candidate.")] = 150,
    calibrate_on: Annotated[int, typer.Option("--calibrate-on", help="Questions of a calibration.")] = 30,
    repeats: Annotated[int, typer.Option(min=1, help="Calibrations.")] = 200,
    seed: Seed = 0,
    json: Json = None,
) -> None:
    """Whether quality budgets hold: calibrated on some questions, checked on others."""
    from benchmarks.selection import budget as module

    quiet_loading()
    settings = module.CheckSettings(
        budgets=numbers("--budgets", budgets),
        encoders=names(encoders),
        policies=names(policies),
        questions=questions,
        calibrate_on=calibrate_on,
        repeats=repeats,
        seed=seed,
    )
    report = module.run(settings, progress=True)
    show(report.part("budget").table(f"Budgets, checked on other questions: {report.model}"))
    show(report.part("losses").table("Loss per question, nats per token of full's answer"))
    written(report, json)
