"""fidelity and budget: the reader over the sample world."""

from __future__ import annotations

from typing import Annotated

import typer

from benchmarks.world.reader_folder import READER
from ragcachekit.cli.console import quiet_loading, show, written
from ragcachekit.cli.options import (
    Device,
    Dtype,
    Encoders,
    Json,
    Plot,
    Policies,
    Resume,
    Seed,
    names,
    numbers,
)
from ragcachekit.cli.quality import Neighbours, resumed


def fidelity(
    model: Annotated[str, typer.Option(help="Folder or hub id; default: the reader.")] = READER,
    policies: Policies = None,
    encoders: Encoders = "standalone",
    neighbours: Neighbours = "embedding",
    questions_per_type: Annotated[int, typer.Option(min=1)] = 100,
    seed: Seed = 0,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 16,
    device: Device = None,
    dtype: Dtype = "auto",
    resume: Resume = None,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """What reuse does to answers about the sample world."""
    from benchmarks.world import fidelity as module
    from ragcachekit.commands.bench.fidelity import FidelitySettings
    from ragcachekit.commands.bench.fidelity_rows import plot as draw
    from ragcachekit.commands.bench.fidelity_rows import tables

    quiet_loading()
    settings = FidelitySettings(
        model=model,
        policies=names(policies),
        encoders=names(encoders),
        neighbours=neighbours,
        seed=seed,
        max_new_tokens=max_new_tokens,
        device=device,
        dtype=dtype,
    )
    report = resumed(
        lambda work: module.run(settings, questions_per_type, work=work, progress=True), tables, resume, json
    )
    if plot is not None:
        draw(report, plot)


def budget(
    budgets: Annotated[str, typer.Option(help="With commas between.")] = "0.05,0.1,0.2,0.4",
    encoders: Encoders = "standalone,similar:1",
    policies: Policies = None,
    questions: Annotated[int, typer.Option(min=1, help="Asked of every candidate.")] = 150,
    calibrate_on: Annotated[int, typer.Option(help="Questions of a calibration.")] = 30,
    repeats: Annotated[int, typer.Option(min=1, help="Calibrations.")] = 200,
    seed: Seed = 0,
    json: Json = None,
) -> None:
    """Whether quality budgets hold: calibrated on some questions, checked on others."""
    from benchmarks.selection import budget as module

    quiet_loading()
    settings = module.CheckSettings(
        numbers("--budgets", budgets),
        names(encoders),
        names(policies),
        questions,
        calibrate_on,
        repeats,
        seed,
    )
    report = module.run(settings, progress=True)
    show(report.part("budget").table(f"Budgets, checked on other questions: {report.model}"))
    show(report.part("losses").table("Loss per question, nats per token of full's answer"))
    written(report, json)
