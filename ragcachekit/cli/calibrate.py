"""calibrate: what a quality budget stands for."""

from __future__ import annotations

from typing import Annotated

import typer

from ragcachekit.cli.console import note, quiet_loading, show, written
from ragcachekit.cli.options import (
    CacheDir,
    ChunkTokens,
    Device,
    Dtype,
    Json,
    MaxNewTokens,
    ModelName,
    Namespace,
    Plot,
    Policies,
    ProbedCorpus,
    Probes,
    QuestionsFile,
    Seed,
    check_folders,
    check_questions,
    model_given,
    names,
)


def calibrate(
    model: ModelName = None,
    questions: QuestionsFile = None,
    corpus: ProbedCorpus = None,
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
    probes: Probes = 200,
    chunk_tokens: ChunkTokens = 200,
    cache: CacheDir = None,
    seed: Seed = 0,
    max_new_tokens: MaxNewTokens = 64,
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
        policies=names(policies),
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
    written(report, json, plot, lambda _, path: module.plot(record, path))
