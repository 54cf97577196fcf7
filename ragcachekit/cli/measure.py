"""demo, check-model and bench: what is measured on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ragcachekit.cli.console import pairs, put, quiet_loading, show
from ragcachekit.cli.options import Device, DeviceOrCpu, Dtype, Json, ModelName, Plot, names


def demo(
    quick: Annotated[
        bool, typer.Option("--quick", help="A minute: shows that all works, its figures mean nothing.")
    ] = False,
    full: Annotated[
        bool, typer.Option("--full", help="All of the standard library's manual, not about 1,000 chunks.")
    ] = False,
    out: Annotated[Path, typer.Option("--out", help="Folder for JSON, plot and embeddings.")] = Path(
        "demo-out"
    ),
) -> None:
    """Two tables and a plot: answers of a small trained model, and speed on real documents."""
    if quick and full:
        raise ValueError("give --quick or --full, not both")
    from ragcachekit.bench import demo as module

    quiet_loading()
    module.run(out=out, quick=quick, full_manual=full)


def check_model(
    model: Annotated[
        str | None, typer.Argument(help="Folder of a Hugging Face model, a hub id, or 'reader'.")
    ] = None,
    all_families: Annotated[
        bool,
        typer.Option(
            "--all-families", help="A tiny random model of every family of the installed transformers."
        ),
    ] = False,
    json: Json = None,
    markdown: Annotated[
        Path | None, typer.Option("--markdown", help="With --all-families: write the table as a page here.")
    ] = None,
    device: Device = None,
    dtype: Dtype = "auto",
) -> None:
    """Check whether chunk KV can be reused on a model without changing what it computes.

    Ends with 0 if it can (status exact), with 1 if the model is refused or the check found a difference;
    with --all-families, with 1 if any family was admitted and came out wrong.
    """
    if (model is None) != all_families or (markdown is not None and not all_families):
        raise ValueError("give a model, or --all-families (which alone can have --markdown)")
    quiet_loading()
    if model is None:
        _check_families(json, markdown)
        return
    from ragcachekit.bench import check_model as module

    checked = module.run(model, device=device, dtype=dtype)
    if json is not None:
        module.report(checked, model).write_json(json)
    rows = {"family": checked.family, "status": checked.status, "reason": checked.reason}
    if checked.max_abs_diff is not None:
        rows["max difference"] = (
            f"{checked.max_abs_diff:.2g} of the largest value, allowed {checked.tolerance:.0e}"
        )
    put(pairs({**rows, "rotary embedding": "\n".join(checked.rope)}))
    raise typer.Exit(0 if checked.exact else 1)


def _check_families(json: Path | None, markdown: Path | None) -> None:
    from ragcachekit.bench import check_families as module

    checks = module.run()
    report = module.report(checks)
    show(report.table("Families of causal language models, tiny random models"))
    typer.echo(module.summary(checks))
    if json is not None:
        report.write_json(json)
    if markdown is not None:
        markdown.write_text(module.markdown(checks))
    raise typer.Exit(1 if any(check.status == module.WRONG for check in checks) else 0)


def ttft(
    shape: Annotated[
        str | None,
        typer.Option(
            "--shape",
            help="Random weights: smollm2-135m (default), qwen2.5-0.5b, llama-3.1-8b; tiny, to try it out.",
        ),
    ] = None,
    model: ModelName = None,
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", min=1, help="Of the whole prompt.")] = 2048,
    chunk_tokens: Annotated[int, typer.Option("--chunk-tokens", min=1, help="Of each chunk, about.")] = 490,
    question_tokens: Annotated[int, typer.Option("--question-tokens", min=1)] = 64,
    policies: Annotated[str, typer.Option("--policies", help="With commas between.")] = "full,lego:16,reuse",
    tiers: Annotated[
        str, typer.Option("--tiers", help="Where the KV lies: gpu, host, disk, disk-cold.")
    ] = "host",
    dtype: Annotated[str, typer.Option("--dtype", help="float32, bfloat16, float16.")] = "float32",
    runs: Annotated[int, typer.Option("--runs", min=1, help="Rounds; the median counts.")] = 5,
    device: DeviceOrCpu = "cpu",
    seed: Annotated[int, typer.Option("--seed")] = 0,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """Time to first token of one long prompt, in every way, beside a check that the answers agree."""
    from ragcachekit.bench import ttft as module
    from ragcachekit.bench.workspace import model_path

    quiet_loading()
    report = module.run(
        shape=shape,
        model=None if model is None else model_path(model),
        prompt_tokens=prompt_tokens,
        chunk_tokens=chunk_tokens,
        question_tokens=question_tokens,
        policies=names(policies),
        tiers=names(tiers),
        dtype=dtype,
        runs=runs,
        device=device,
        seed=seed,
    )
    show(report.table(f"Time to first token: {report.model}"))
    if json is not None:
        report.write_json(json)
    if plot is not None:
        module.plot(report, plot)


def query_cache(
    lookups: Annotated[int, typer.Option("--lookups", min=1, help="Timed lookups of each kind.")] = 2000,
    questions: Annotated[
        int, typer.Option("--questions", min=0, help="Of the sweep, each in four wordings; 0: no sweep.")
    ] = 200,
    seed: Annotated[int, typer.Option("--seed")] = 0,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """Lookup times at 300 and 1,000 entries, the wrapper's overhead, hit rates over tolerances."""
    from ragcachekit.bench import query_cache_report as module

    quiet_loading()
    report = module.measure(lookups=lookups, questions=questions, seed=seed, progress=True)
    titles = {
        module.LOOKUP: "One lookup, in microseconds (median, least, greatest)",
        module.WRAPPER: "What the retriever wrapper adds to an uncached call, embedding aside",
        module.SWEEP: f"Hit rate and recall: {report.model}",
    }
    for name, title in titles.items():
        if (part := module.part(report, name)).rows:
            show(part.table(title))
    if json is not None:
        report.write_json(json)
    if plot is not None:
        module.plot(report, plot)
