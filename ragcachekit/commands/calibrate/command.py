"""``ragcachekit calibrate``."""

from __future__ import annotations

from typing import Annotated

import typer

from ragcachekit.commands import options as opt
from ragcachekit.commands.console import note, quiet_loading, show, written


def calibrate(
    model: opt.Model = "",
    questions: opt.QuestionsFile = None,
    corpus: opt.OptionalCorpus = None,
    encoder: Annotated[str, typer.Option(help="standalone, similar:1, ...")] = "standalone",
    neighbours: opt.Neighbours = "document",
    quality: Annotated[
        str,
        typer.Option(help="What may be lost: kl, answer-loss, gold-loss (nats per token), contains, f1."),
    ] = "kl",
    budget: Annotated[float, typer.Option(help="How much of it, on average over questions.")] = 0.1,
    policies: opt.Policies = None,
    namespace: opt.Namespace = "default",
    probes: opt.Probes = 30,
    chunk_tokens: opt.ChunkTokens = 200,
    cache: opt.CacheDir = None,
    seed: opt.Seed = 0,
    max_new_tokens: opt.MaxNewTokens = 24,
    device: opt.Device = None,
    dtype: opt.Dtype = "auto",
    json: opt.Json = None,
) -> None:
    """Find the cheapest policy that surely loses no more than a budget, and store it for policy="budget:x".

    Questions need no right answers for kl and answer-loss, which compare with full's own answers.
    """
    from ragcachekit.commands.calibrate import run as module

    quiet_loading()
    settings = opt.settings_of(
        module.CalibrateSettings, locals(), policies=opt.names(policies), cache_dir=cache
    )
    record, report = module.run(settings, progress=True)
    columns = ("policy", "ratio_spent", "n", "loss", "upper", "kl", "answer_loss", "gold_loss", "decision")
    show(report.table(f"Loss against full: {record.quality}, up to {record.n} {record.sample}", columns))
    typer.echo(module.summary(record))
    note(f"stored for namespace {record.namespace!r} in {settings.folder}")
    written(report, json)
