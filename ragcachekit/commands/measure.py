"""``ragcachekit calibrate``, ``bench ttft`` and ``bench fidelity``, light to import."""

from __future__ import annotations

from typing import Annotated

import typer

from ragcachekit.commands import options as opt
from ragcachekit.commands.console import note, quiet_loading, show, written
from ragcachekit.commands.grades import FIDELITY, check_linked
from ragcachekit.commands.workspace import CacheFolder, load_checked
from ragcachekit.types import DEFAULT_ENCODER, DEFAULT_POLICY


def calibrate(
    model: opt.Model = "",
    questions: opt.QuestionsFile = None,
    corpus: opt.OptionalCorpus = None,
    encoder: opt.Encoders = DEFAULT_ENCODER,
    budget: opt.Budget = 0.1,
    policies: opt.Policies = None,
    namespace: opt.Namespace = "default",
    probes: Annotated[int, typer.Option(min=8, help="How many to make from the corpus.")] = 30,
    chunk_tokens: opt.ChunkTokens = 200,
    cache: opt.CacheDir = None,
    seed: opt.Seed = 0,
    max_new_tokens: opt.MaxNewTokens = 24,
    device: opt.Device = None,
    dtype: opt.Dtype = "auto",
    json: opt.Json = None,
) -> None:
    """Find the cheapest policy that surely loses no more than a budget, and store it for policy="budget:x".

    Questions need no right answers: full's own are what is compared with.
    """
    opt.check_sample(questions, corpus)
    quiet_loading()
    from ragcachekit.commands import calibrate as module
    from ragcachekit.commands.questions import read_sample

    chosen = {"probes": probes, "chunk_tokens": chunk_tokens, "seed": seed}
    record, report = module.run(
        model,
        read_sample(model, questions, corpus, [encoder], answered=False, **chosen),
        encoder=encoder,
        policies=opt.names(policies),
        budget=budget,
        namespace=namespace,
        max_new_tokens=max_new_tokens,
        seed=seed,
        device=device,
        dtype=dtype,
        cache_dir=cache,
        progress=True,
    )
    columns = ("policy", "ratio_spent", "n", "loss", "upper", "decision")
    show(report.table(f"KL against full in nats per token, up to {record.n} {record.sample}", columns))
    typer.echo(module.summary(record))
    note(f"stored for namespace {record.namespace!r} in {CacheFolder.at(cache).path}")
    written(report, json)


def fidelity(
    model: opt.Model = "",
    questions: opt.QuestionsFile = None,
    corpus: opt.OptionalCorpus = None,
    policies: opt.Policies = None,
    encoders: opt.Encoders = DEFAULT_ENCODER,
    probes: opt.Probes = 200,
    chunk_tokens: opt.ChunkTokens = 200,
    seed: opt.Seed = 0,
    max_new_tokens: opt.MaxNewTokens = 64,
    cache: opt.CacheDir = None,
    device: opt.Device = None,
    dtype: opt.Dtype = "auto",
    json: opt.Json = None,
) -> None:
    """What reuse does to answers: every policy over every encoder, beside a full prefill.

    Answers to probes that are made of a corpus are to be read by their agreement with full.
    """
    opt.check_sample(questions, corpus)
    quiet_loading()
    from ragcachekit.commands import fidelity as module
    from ragcachekit.commands.questions import read_sample

    chosen, over = opt.names(policies), opt.names(encoders)
    module.check_encoders(over)
    sample = read_sample(model, questions, corpus, over, probes=probes, chunk_tokens=chunk_tokens, seed=seed)
    lm, tokenizer = load_checked(model, device, dtype)
    check_linked(lm, tokenizer, cache, FIDELITY)
    ways = module.pairs(lm, tokenizer, chosen, over)
    results: module.Results = {}
    module.measure(
        *(lm, tokenizer, sample, ways, results), max_new_tokens=max_new_tokens, cache_dir=cache, progress=True
    )
    rows = module.quality_rows(sample.questions, ways, results, seed)
    report = module.report_of(model, seed, rows, len(sample.questions))
    for table in module.tables(report):
        show(table)
    written(report, json)


def ttft(
    model: opt.Model = "",
    corpus: opt.OptionalCorpus = None,
    prompt_tokens: opt.PromptTokens = "2048",
    chunk_tokens: opt.PromptChunkTokens = 490,
    question_tokens: opt.QuestionTokens = 64,
    policies: opt.PolicyNames = f"full,{DEFAULT_POLICY},reuse",
    encoder: opt.Encoder = DEFAULT_ENCODER,
    tiers: opt.Tiers = "host",
    dtype: opt.Dtypes = "float32",
    runs: opt.Runs = 5,
    device: opt.DeviceOrCpu = "cpu",
    seed: opt.Seed = 0,
    json: opt.Json = None,
) -> None:
    """Time to first token of one long prompt, in every way, beside a check that the answers agree."""
    quiet_loading()
    from ragcachekit.commands import ttft as module

    settings = opt.settings_of(
        module.TtftSettings, locals(), **module.lists(prompt_tokens, policies, tiers, dtype)
    )
    report = module.run(settings, progress=True)
    show(report.table(f"Time to first token: {report.model}"))
    written(report, json)
