"""The fidelity bench over the sample world, answered by the reader."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Annotated

import typer

from benchmarks.world.questions import world_sample
from benchmarks.world.reader_folder import ANSWER_TOKENS, READER, READER_NAME, one_thread
from ragcachekit.commands import fidelity as shipped
from ragcachekit.commands import options as opt
from ragcachekit.commands.console import quiet_loading, resumed
from ragcachekit.commands.fidelity import FidelitySettings, tables
from ragcachekit.commands.fidelity import plot as draw
from ragcachekit.commands.report import BenchReport

POLICIES = (
    *("reuse", "lego0", *(f"lego:{k}" for k in (1, 2, 4, 6, 12))),
    *(
        f"{kind}:{r}"
        for kind in ("random", "heavy", "query", "deep", "impact")
        for r in (0.05, 0.1, 0.15, 0.3)
    ),
    *("cacheblend:0.05", "cacheblend:0.15", "cacheblend-gradual:0.15"),
    *(f"craft:{alpha}" for alpha in (0.1, 0.2, 0.3, 0.6)),  # over standalone half of it is spent
    "craft-focused:0.6",
)


def fidelity(
    model: Annotated[str, typer.Option("--model", help="Folder or hub id; default: the reader.")] = READER,
    policies: opt.Policies = None,
    encoders: opt.Encoders = "standalone",
    neighbours: opt.Neighbours = "embedding",
    questions_per_type: Annotated[int, typer.Option(min=1)] = 100,
    seed: opt.Seed = 0,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = ANSWER_TOKENS,
    device: opt.Device = None,
    dtype: opt.Dtype = "auto",
    resume: opt.Resume = None,
    json: opt.Json = None,
    plot: opt.Plot = None,
) -> None:
    """What reuse does to answers about the sample world."""
    quiet_loading()
    settings = FidelitySettings(
        model=model,
        policies=opt.names(policies),
        encoders=opt.names(encoders),
        neighbours=neighbours,
        seed=seed,
        max_new_tokens=max_new_tokens,
        device=device,
        dtype=dtype,
    )
    report = resumed(
        lambda work: run(settings, questions_per_type, work=work, progress=True), tables, resume, json
    )
    if plot is not None:
        draw(report, plot)


def run(
    settings: FidelitySettings,
    per_type: int,
    *,
    work: str | os.PathLike[str] | None = None,
    progress: bool = False,
) -> BenchReport:
    """Ask ``per_type`` questions of each kind about the world of the settings' seed."""
    settings = replace(settings, policies=settings.policies or POLICIES)  # the reader's prompts cost little
    with one_thread():
        sample = world_sample(settings.seed, per_type)
        report = shipped.run(settings, sample, work=work, progress=progress)
    return replace(report, model=READER_NAME) if settings.model == READER else report
