"""estimate: one's own questions over one's own files, without generating."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from ragcachekit.bench.estimate_log import read_log
from ragcachekit.cli.console import note, pairs, put, quiet_loading, show, size
from ragcachekit.cli.options import (
    CacheDir,
    ChunkTokens,
    CorpusDir,
    Device,
    Dtype,
    Encoder,
    Json,
    ModelName,
    Plot,
    Policy,
    check_folders,
    model_given,
    names,
)

if TYPE_CHECKING:
    from ragcachekit.bench.estimate import Estimate


def estimate(
    log: Annotated[
        str,
        typer.Option(
            "--log",
            help='Questions, one per line: plain, or {"query": ..., "docs": [...], "time": ..., '
            '"answer_tokens": ...}; docs are texts or file#number, what your retriever returned.',
        ),
    ],
    corpus: CorpusDir,
    model: ModelName = None,
    policy: Policy = "lego:16",
    encoder: Encoder = None,
    k: Annotated[int, typer.Option("-k", "--k", min=1, help="Chunks that are retrieved.")] = 4,
    tolerance: Annotated[
        float, typer.Option("--tolerance", min=0.0, help="Of the query cache, as for `ask`.")
    ] = 0.0,
    host: Annotated[
        str, typer.Option("--host", help="Host memory tiers, as shares of the KV that the log touches.")
    ] = "0.1,0.25,0.5,1",
    eviction: Annotated[str, typer.Option("--eviction", help="Policies to compare.")] = "lru,pgdsf",
    measure: Annotated[
        bool, typer.Option("--measure/--no-measure", help="Measure this machine, or assume one.")
    ] = True,
    disk_gbps: Annotated[
        float | None, typer.Option("--disk-gbps", help="GB/s of your disk; default: it is measured.")
    ] = None,
    cache: CacheDir = None,
    chunk_tokens: ChunkTokens = 200,
    device: Device = None,
    dtype: Dtype = "auto",
    json: Json = None,
    plot: Plot = None,
) -> None:
    """Will it help me? Hit rates, KV bytes and times to first token for your log, and what to do."""
    chosen = model_given(model)
    read_log(log)
    check_folders(corpus, cache)
    from ragcachekit.bench import estimate_report
    from ragcachekit.bench.estimate import EstimateSettings, run
    from ragcachekit.bench.estimate_advice import advise

    settings = EstimateSettings(
        log=log,
        corpus=corpus,
        model=chosen,
        policy=policy,
        encoder=encoder,
        k=k,
        tolerance=tolerance,
        cache=cache,
        chunk_tokens=chunk_tokens,
        device=device,
        dtype=dtype,
        shares=_shares(host),
        evictions=names(eviction),
        measure=measure,
        disk_gbps=disk_gbps,
    )
    quiet_loading()
    found = run(settings, note, progress=True)
    advice = advise(found)
    report = estimate_report.report(found, advice)
    for line in (*found.notes, *found.speeds.notes):
        note(line)
    put(_about(report.rows[0], found))
    tiers = estimate_report.part(report, estimate_report.TIERS)
    show(tiers.table("Where chunks come from, and the time to first token", estimate_report.TIER_COLUMNS))
    policies = estimate_report.part(report, estimate_report.POLICIES)
    show(policies.table("With the tiers advised below", ("policy", "ttft_ms", "ttft_ms_p90", "speedup")))
    for line in advice.lines:
        typer.echo(line)
    if json is not None:
        report.write_json(json)
    if plot is not None:
        estimate_report.plot(report, plot)


def _shares(text: str) -> tuple[float, ...]:
    try:
        return tuple(map(float, names(text)))
    except ValueError as error:
        raise ValueError(f"--host is a list of shares such as 0.1,0.5,1, not {text!r}") from error


def _about(row: dict[str, Any], found: Estimate) -> Table:
    near = [
        f"{count} within {tolerance:g}" for tolerance, count in found.retrievals.near.items() if tolerance
    ]
    rows = {
        "questions": f"{row['questions']}, {row['repeated']} asked before; in cosine distance of an earlier "
        f"one: {', '.join(near)}",
        "prompts": f"{row['prompt_tokens']:.0f} tokens (median); {row['chunk_token_share']:.0%} of all "
        "tokens are chunks",
        "chunks": f"{row['chunk_uses']} uses of {row['chunks_touched']} different ones "
        f"({row['chunk_reuse']:.0%} of the uses come back); the corpus has {row['chunks_in_corpus']}"
        + (f", {foreign} of those used not among them" if (foreign := row["chunks_not_in_corpus"]) else ""),
        "KV": f"{size(row['kv_bytes_touched'])} that the log touches, {size(row['kv_bytes_corpus'])} of the "
        "corpus",
    }
    if "hours" in row:
        rows["time"] = f"{row['hours']:.3g} hours"
    if "ttft_share_of_answer" in row:
        rows["answers"] = (
            f"{row['ttft_share_of_answer']:.0%} of an answer's time passes before its first token; "
            "what follows it stays as it is"
        )
    return pairs(rows)
