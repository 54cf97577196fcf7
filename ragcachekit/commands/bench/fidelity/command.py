"""``ragcachekit bench fidelity``."""

from __future__ import annotations

from typing import Annotated

import typer

from ragcachekit.commands import options as opt
from ragcachekit.commands.console import quiet_loading, resumed


def fidelity(
    model: opt.Model = "",
    questions: opt.QuestionsFile = None,
    corpus: opt.OptionalCorpus = None,
    policies: opt.Policies = None,
    encoders: opt.Encoders = "standalone",
    dataset: opt.Dataset = None,
    count: Annotated[int, typer.Option(min=1, help="Questions drawn from the dataset.")] = 50,
    distractors: Annotated[int, typer.Option(min=0, help="Passages beside the relevant ones.")] = 3,
    order: Annotated[str, typer.Option(help="Of passages: shuffled or given.")] = "shuffled",
    half: Annotated[str, typer.Option(help="Of the dataset: all, develop or report.")] = "all",
    prompt: Annotated[str, typer.Option(help="ask (as the command does) or few-shot.")] = "ask",
    neighbours: opt.Neighbours = "embedding",
    probes: opt.Probes = 200,
    chunk_tokens: opt.ChunkTokens = 200,
    seed: opt.Seed = 0,
    max_new_tokens: opt.MaxNewTokens = 64,
    cache: opt.CacheDir = None,
    device: opt.Device = None,
    dtype: opt.Dtype = "auto",
    resume: opt.Resume = None,
    json: opt.Json = None,
    plot: opt.Plot = None,
) -> None:
    """What reuse does to answers: every policy over every encoder, beside a full prefill.

    Answers to probes that are made of a corpus are to be read by their agreement with full.
    """
    from ragcachekit.commands.bench.fidelity import run as module
    from ragcachekit.commands.bench.fidelity.datasets.base import Sampling
    from ragcachekit.commands.bench.fidelity.plot import plot as draw
    from ragcachekit.commands.bench.fidelity.rows import tables

    quiet_loading()
    lists: dict[str, object] = {"policies": opt.names(policies), "encoders": opt.names(encoders)}
    lists["sampling"] = Sampling(count, distractors, order, half, seed)
    settings = opt.settings_of(module.FidelitySettings, locals(), cache_dir=cache, **lists)
    report = resumed(lambda work: module.run(settings, work=work, progress=True), tables, resume, json)
    if plot is not None:
        draw(report, plot)
