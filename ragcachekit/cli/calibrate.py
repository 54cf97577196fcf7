"""calibrate: what a quality budget stands for."""

from __future__ import annotations

from typing import Annotated

import typer

from ragcachekit.cli import options as opt
from ragcachekit.cli.console import note, quiet_loading, show, written


def calibrate(
    model: opt.ModelName = None,
    questions: opt.QuestionsFile = None,
    corpus: opt.ProbedCorpus = None,
    encoder: Annotated[str, typer.Option("--encoder", help="standalone, similar:1, ...")] = "standalone",
    neighbours: Annotated[
        str,
        typer.Option("--neighbours", help="Of similar:n: similar (all-MiniLM) or preceding (in file)."),
    ] = "similar",
    budget: Annotated[float, typer.Option("--budget", help="F1 that may be lost against full.")] = 0.01,
    policies: opt.Policies = None,
    namespace: opt.Namespace = "default",
    probes: opt.Probes = 200,
    chunk_tokens: opt.ChunkTokens = 200,
    cache: opt.CacheDir = None,
    seed: opt.Seed = 0,
    max_new_tokens: opt.MaxNewTokens = 64,
    device: opt.Device = None,
    dtype: opt.Dtype = "auto",
    json: opt.Json = None,
    plot: opt.Plot = None,
) -> None:
    """Find the cheapest policy that loses no more than a budget, and store it for policy="budget:x"."""
    chosen = opt.model_given(model)
    opt.check_folders(corpus, cache)
    opt.check_questions(questions)
    from ragcachekit.commands.calibrate import run as module

    quiet_loading()
    settings = opt.settings_of(
        module.CalibrateSettings, locals(), model=chosen, policies=opt.names(policies), cache_dir=cache
    )
    record = module.run(settings, progress=True)
    report = module.report(record, chosen)
    columns = ("policy", "ratio_spent", "f1", "loss", "doubt", "upper", "within", "chosen")
    show(report.table(f"F1 lost against full, {record.n} questions ({record.quality})", columns))
    typer.echo(module.summary(record))
    note(f"stored for namespace {record.namespace!r} in {settings.folder}")
    written(report, json, plot, lambda _, path: module.plot(record, path))
