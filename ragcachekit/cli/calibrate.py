"""calibrate: what a quality budget stands for; bench budget: whether it holds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ragcachekit.cli.console import note, quiet_loading, show
from ragcachekit.cli.options import (
    CacheDir,
    ChunkTokens,
    Device,
    Dtype,
    Json,
    ModelName,
    Namespace,
    Plot,
    check_folders,
    check_questions,
    model_given,
    names,
)

Policies = Annotated[
    str | None,
    typer.Option("--policies", help="Candidates, with commas between; default: a list of all kinds."),
]


def calibrate(
    model: ModelName = None,
    questions: Annotated[
        Path | None, typer.Option("--questions", help='JSONL, per line {"question", "chunks", "answer"}.')
    ] = None,
    corpus: Annotated[
        Path | None,
        typer.Option("--corpus", help="Folder of texts; without --questions, probes are made from it."),
    ] = None,
    encoder: Annotated[
        str, typer.Option("--encoder", help="What chunks are encoded behind: standalone, similar:1, ...")
    ] = "standalone",
    neighbours: Annotated[
        str,
        typer.Option(
            "--neighbours",
            help="For similar:n: 'similar' (all-MiniLM) or 'preceding' (in the file, as for `ask`).",
        ),
    ] = "similar",
    budget: Annotated[
        float, typer.Option("--budget", help="F1 that may be lost against full; 0.01 is one point.")
    ] = 0.01,
    policies: Policies = None,
    namespace: Namespace = "default",
    probes: Annotated[int, typer.Option("--probes", min=1, help="How many to make from the corpus.")] = 200,
    chunk_tokens: ChunkTokens = 200,
    cache: CacheDir = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the probes and the bounds.")] = 0,
    max_new_tokens: Annotated[
        int | None, typer.Option("--max-new-tokens", min=1, help="Default 16 for the reader, else 64.")
    ] = None,
    device: Device = None,
    dtype: Dtype = "auto",
    json: Json = None,
    plot: Plot = None,
) -> None:
    """Find the cheapest policy that loses no more than a budget, and store it for policy="budget:x"."""
    chosen = model_given(model)
    check_folders(corpus, cache)
    check_questions(questions)
    from ragcachekit.bench import calibrate as module

    quiet_loading()
    settings = module.CalibrateSettings(
        model=chosen,
        questions=questions,
        corpus=corpus,
        encoder=encoder,
        neighbours=neighbours,
        budget=budget,
        policies=names(policies) if policies is not None else (),
        namespace=namespace,
        probes=probes,
        chunk_tokens=chunk_tokens,
        seed=seed,
        max_new_tokens=max_new_tokens,
        device=device,
        dtype=dtype,
        cache_dir=cache,
    )
    record = module.run(settings, progress=True)
    report = module.report(record, chosen)
    columns = ("policy", "ratio_spent", "f1", "loss", "doubt", "upper", "within", "chosen")
    show(report.table(f"F1 lost against full, {record.n} questions ({record.quality})", columns))
    typer.echo(module.summary(record))
    note(f"stored for namespace {record.namespace!r} in {settings.folder}")
    if json is not None:
        report.write_json(json)
    if plot is not None:
        module.plot(record, plot)


def budget(
    budgets: Annotated[str, typer.Option("--budgets", help="With commas between.")] = "0.01,0.02,0.05",
    encoders: Annotated[
        str, typer.Option("--encoders", help="With commas between.")
    ] = "standalone,similar:1",
    policies: Policies = None,
    calibrate_on: Annotated[int, typer.Option("--calibrate-on", min=1, help="Questions.")] = 200,
    measure_on: Annotated[int, typer.Option("--measure-on", min=1, help="Other questions.")] = 500,
    seed: Annotated[int, typer.Option("--seed")] = 0,
    json: Json = None,
) -> None:
    """Whether quality budgets hold: calibrated on questions about the sample world, measured on others."""
    from ragcachekit.bench import calibrate_check as module

    quiet_loading()
    settings = module.CheckSettings(
        budgets=tuple(float(one) for one in names(budgets)),
        encoders=names(encoders),
        policies=names(policies) if policies is not None else (),
        calibrate_on=calibrate_on,
        measure_on=measure_on,
        seed=seed,
    )
    report = module.run(settings, progress=True)
    found = module.parts(report)
    columns = [name for name in found["budget"].rows[0] if name not in ("part", "f1_full", "f1")]
    show(found["budget"].table(f"Budgets, measured on other questions: {report.model}", columns))
    show(found["curve"].table("The curves that were calibrated", list(found["curve"].rows[0])[1:]))
    if json is not None:
        report.write_json(json)
