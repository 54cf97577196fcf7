"""``python -m benchmarks fidelity``: what reuse does to the reader's answers about the sample world."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
import typer
from rich.table import Table

from benchmarks.world.questions import held_out_world, world_questions
from benchmarks.world.reader_folder import ANSWER_TOKENS, READER, READER_NAME, one_thread
from ragcachekit.commands import options as opt
from ragcachekit.commands.bench.fidelity import rows as shipped_rows
from ragcachekit.commands.bench.fidelity import run as shipped
from ragcachekit.commands.bench.fidelity.engines import FULL
from ragcachekit.commands.bench.fidelity.plot import plot as draw
from ragcachekit.commands.bench.fidelity.rows import DEVIATIONS, Results, Row, mean_row
from ragcachekit.commands.bench.fidelity.run import FidelitySettings
from ragcachekit.commands.bench.report import BenchReport, table
from ragcachekit.commands.bench.resample import Bootstrap
from ragcachekit.commands.console import quiet_loading, resumed
from ragcachekit.commands.own_questions import DOCUMENT, Sample, neighbours_of
from ragcachekit.plan.neighbours import Neighbours, PrecedingChunks

LAYER = "layer"
_POLICIES = (
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
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Default 16 for the reader, else 64.")
    ] = None,
    device: opt.Device = None,
    dtype: opt.Dtype = "auto",
    resume: opt.Resume = None,
    json: opt.Json = None,
    plot: opt.Plot = None,
) -> None:
    """What reuse does to answers about the sample world, also layer by layer."""
    quiet_loading()
    settings = WorldFidelitySettings(
        model=model,
        policies=opt.names(policies),
        encoders=opt.names(encoders),
        neighbours=neighbours,
        per_type=questions_per_type,
        seed=seed,
        max_new_tokens=max_new_tokens or (ANSWER_TOKENS if model == READER else 64),
        device=device,
        dtype=dtype,
    )
    report = resumed(lambda work: run(settings, work=work, progress=True), tables, resume, json)
    if plot is not None:
        draw(report, plot)


@dataclass(frozen=True)
class WorldFidelitySettings(FidelitySettings):
    """What is measured; ``per_type`` questions of each kind are asked."""

    model: str = READER
    max_new_tokens: int = ANSWER_TOKENS
    per_type: int = 100


def run(
    settings: WorldFidelitySettings | None = None,
    *,
    work: str | os.PathLike[str] | None = None,
    neighbours: Neighbours | None = None,
    progress: bool = False,
) -> BenchReport:
    """As :func:`ragcachekit.commands.bench.fidelity.run.run`, with rows by layer."""
    chosen = settings or WorldFidelitySettings()
    chosen = replace(chosen, policies=chosen.policies or _POLICIES)  # the reader's prompts cost little
    chosen.check()
    questions = world_questions(chosen.seed, chosen.per_type)

    def near() -> Neighbours:
        if neighbours is not None:
            return neighbours
        if chosen.neighbours == DOCUMENT:
            return PrecedingChunks(article.chunks for article in held_out_world(chosen.seed).articles)
        return neighbours_of(Sample(tuple(questions)), False, progress)

    with one_thread():
        results = shipped.ask(chosen, questions, near, work=work, progress=progress)
    report = shipped.report(chosen, questions, results)
    *quality, check = report.rows
    report = replace(report, rows=(*quality, *layer_rows(results, chosen.seed), check))
    return replace(report, model=READER_NAME) if chosen.model == READER else report


def layer_rows(results: Results, seed: int) -> list[Row]:
    """One row per way and layer: how far the chunks' keys and values are from those of ``full``."""
    bootstrap = Bootstrap(len(results[FULL]), seed)
    out: list[Row] = []
    for way, found in results.items():
        for layer in range(len(found[0].key_deviation)) if way != FULL else ():
            row: Row = {"part": LAYER, "policy": way.policy, "encoder": way.encoder, "layer": layer}
            for name in DEVIATIONS:
                row |= mean_row(name, np.array([getattr(one, name)[layer] for one in found]), bootstrap)
            out.append({**row, "n": len(found)})
    return out


def tables(report: BenchReport) -> Iterator[Table]:
    """Those of the shipped bench, and the deviations by layer."""
    yield from shipped_rows.tables(report)
    yield layer_table(report.part(LAYER).rows)


def layer_table(rows: Sequence[Row]) -> Table:
    """One line per policy and encoder, one column per layer: keys / values."""
    lines: dict[tuple[str, str], Row] = {}
    for row in rows:
        way = (row["policy"], row["encoder"])
        line = lines.setdefault(way, {"policy": way[0], "encoder": way[1]})
        line[f"layer {row['layer']}"] = f"{row['key_deviation']:.2g} / {row['value_deviation']:.2g}"
    return table("Deviation of chunk keys / values from full, relative", list(lines.values()))
