"""estimate: one's own questions over one's own files, without generating."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from ragcachekit.cli import options as opt
from ragcachekit.cli.console import note, pairs, put, quiet_loading, show, size, written
from ragcachekit.commands.estimate.log import read_log

if TYPE_CHECKING:
    from ragcachekit.commands.estimate.run import Estimate


def estimate(
    log: Annotated[
        str,
        typer.Option(
            "--log",
            help='Questions, one per line: plain, or {"query": ..., "docs": [...]}; '
            "docs are texts or file#number, what your retriever returned.",
        ),
    ],
    corpus: opt.CorpusDir,
    model: opt.ModelName = None,
    policy: opt.Policy = "lego:16",
    encoder: opt.Encoder = None,
    k: opt.K = 4,
    tolerance: opt.Tolerance = 0.0,
    host: Annotated[str, typer.Option("--host", help="Host tiers, as shares of the KV.")] = "0.1,0.25,0.5,1",
    eviction: Annotated[str, typer.Option("--eviction", help="Policies to compare.")] = "lru,pgdsf",
    measure: Annotated[bool, typer.Option("--measure/--no-measure", help="Or assume a machine.")] = True,
    disk_gbps: Annotated[float | None, typer.Option("--disk-gbps", help="Default: it is measured.")] = None,
    cache: opt.CacheDir = None,
    chunk_tokens: opt.ChunkTokens = 200,
    device: opt.Device = None,
    dtype: opt.Dtype = "auto",
    json: opt.Json = None,
    plot: opt.Plot = None,
) -> None:
    """Will it help me? Hit rates, KV bytes and times to first token for your log, and what to do."""
    chosen = opt.model_given(model)
    read_log(log)
    opt.check_folders(corpus, cache)
    from ragcachekit.commands.estimate import report as estimate_report
    from ragcachekit.commands.estimate.run import EstimateSettings, run

    shares, evictions = opt.numbers("--host", host), opt.names(eviction)
    settings = opt.settings_of(EstimateSettings, locals(), model=chosen)
    quiet_loading()
    found = run(settings, note, progress=True)
    advice = estimate_report.advise(found)
    report = estimate_report.report(found, advice)
    for line in (*found.notes, *found.speeds.notes):
        note(line)
    put(_about(report.rows[0], found))
    tiers = estimate_report.part(report, estimate_report.TIERS)
    show(tiers.table("Where chunks come from, and the time to first token", estimate_report.TIER_COLUMNS))
    for line in advice.lines:
        typer.echo(line)
    written(report, json, plot, estimate_report.plot)


def _about(row: dict[str, Any], found: Estimate) -> Table:
    near = [f"{count} within {t:g}" for t, count in found.near.items() if t]
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
    return pairs(rows)
