"""ask, precompute and estimate: a user's files with the user's model."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.filesize import decimal as size
from rich.table import Table

from ragcachekit.cli import options as opt
from ragcachekit.cli.console import INTERRUPTED, counted, errors, note, pairs, quiet_loading, show, written

if TYPE_CHECKING:
    from ragcachekit.commands.ask import Asked
    from ragcachekit.commands.precompute.run import Work


def ask(
    corpus: opt.CorpusDir,
    questions: Annotated[
        list[str] | None, typer.Argument(help="Without any, one per line of the input.")
    ] = None,
    model: opt.Model = "",
    policy: opt.Policy = "impact:0.1",
    encoder: opt.Encoder = None,
    k: opt.K = 4,
    tolerance: opt.Tolerance = 0.0,
    cache: opt.CacheDir = None,
    namespace: opt.Namespace = "default",
    chunk_tokens: opt.ChunkTokens = 200,
    max_new_tokens: opt.MaxNewTokens = 128,
    device: opt.Device = None,
    dtype: opt.Dtype = "auto",
    disk_gb: opt.DiskGb = None,
) -> None:
    """Answer questions about your own files with your own model, and say what was reused.

    Embeddings and chunk KV stay in the cache folder: the next question starts where this one ended.
    """
    from ragcachekit.commands.ask import AskSettings, open_session

    settings = opt.settings_of(AskSettings, locals())
    quiet_loading()
    with open_session(settings, note) as session:
        for question in questions or _typed():
            if len(questions or ()) > 1:
                typer.secho(f"\n{question}", bold=True)
            asked = session.ask(question, lambda text: typer.echo(text, nl=False))
            typer.echo()
            show(_about(asked, session.keep()))


def precompute(
    corpus: opt.CorpusDir,
    model: opt.Model = "",
    policy: opt.Policy = "impact:0.1",
    encoder: opt.Encoder = None,
    cache: opt.CacheDir = None,
    namespace: opt.Namespace = "default",
    chunk_tokens: opt.ChunkTokens = 200,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say how much it is and how long.")] = False,
    keep_gone: Annotated[bool, typer.Option("--keep-gone", help="Leave KV of what is gone.")] = False,
    device: opt.Device = None,
    dtype: opt.Dtype = "auto",
    disk_gb: opt.DiskGb = None,
    shared: Annotated[
        str | None,
        typer.Option(help="Store the KV here, not in the cache folder: redis://..., s3://..., file:///..."),
    ] = None,
    shared_key: Annotated[
        str, typer.Option(help="Environment variable with the key that signs shared entries.")
    ] = "RAGCACHEKIT_KEY",
    ray: Annotated[
        bool, typer.Option("--ray", help="Encode with Ray, on the cluster of RAY_ADDRESS or here.")
    ] = False,
    actors: Annotated[int, typer.Option(min=1, help="Models that encode, with --ray.")] = 2,
) -> None:
    """Encode and embed a corpus now, so that the first question about it is as quick as the others.

    What is stored is skipped: interrupt it when you like and run it again. When documents changed, run
    it again: what changed is encoded, what is gone is forgotten. Give `ask` the same model, cache,
    namespace, chunk size, encoder and dtype.
    """
    from ragcachekit.commands.precompute.run import PrecomputeSettings, estimate, open_run

    settings = opt.settings_of(PrecomputeSettings, locals())
    quiet_loading()
    if dry_run:
        work = estimate(settings)
        show(_amount(work))
        typer.echo(f"it would be: {_changes(work.chunks - work.stored, work.stored, work.gone)}")
        return
    try:
        with open_run(settings, note) as opened:
            work = opened.work
            show(_amount(work))
            seconds = opened.run(progress=work.todo_tokens > 0)
    except KeyboardInterrupt:
        note("interrupted; what was stored stays, the same command goes on from there")
        raise typer.Exit(INTERRUPTED) from None
    new = work.chunks - work.stored
    typer.echo(
        f"encoded {counted(new, 'chunk')} ({work.todo_tokens} tokens, {size(work.todo_bytes)}) "
        f"in {seconds:.1f} s, {work.stored} {'was' if work.stored == 1 else 'were'} stored already"
    )
    typer.echo(_changes(new, work.stored, work.gone))


def estimate(
    log: Annotated[
        str,
        typer.Option(
            help='Questions, one per line: plain, or {"question": ..., "chunks": [...]}; '
            "chunks are texts or file#number, what your retriever returned."
        ),
    ],
    corpus: opt.CorpusDir,
    model: opt.Model = "",
    policy: opt.Policy = "impact:0.1",
    encoder: opt.Encoder = None,
    k: opt.K = 4,
    tolerance: opt.Tolerance = 0.0,
    host: Annotated[str, typer.Option(help="Host tiers, as shares of the KV.")] = "0.1,0.25,0.5,1",
    eviction: Annotated[str, typer.Option(help="Policies to compare.")] = "lru,pgdsf",
    measure: Annotated[bool, typer.Option("--measure/--no-measure", help="Prefills, or assume them.")] = True,
    disk_gbps: Annotated[float | None, typer.Option(help="Of reads from the disk; default 1.")] = None,
    cache: opt.CacheDir = None,
    chunk_tokens: opt.ChunkTokens = 200,
    device: opt.Device = None,
    dtype: opt.Dtype = "auto",
    json: opt.Json = None,
    plot: opt.Plot = None,
) -> None:
    """Will it save time? Hit rates, KV bytes and times to first token for your log, and what to do.

    It says what is known about the quality of answers: `calibrate` measures it.
    """
    from ragcachekit.commands.estimate.log import read_log

    read_log(log)
    from ragcachekit.commands.estimate import report as estimate_report
    from ragcachekit.commands.estimate.run import EstimateSettings, run

    shares, evictions = opt.numbers("--host", host), opt.names(eviction)
    settings = opt.settings_of(EstimateSettings, locals())
    quiet_loading()
    found = run(settings, note, progress=True)
    report = estimate_report.report(found)
    for line in found.notes:
        note(line)
    show(_estimated(found.log))
    tiers = report.part(estimate_report.TIERS)
    show(tiers.table("Where chunks come from, and the time to first token", estimate_report.TIER_COLUMNS))
    typer.echo(report.rows[-1]["text"])
    written(report, json, plot, estimate_report.plot)


def _typed() -> Iterator[str]:
    """Questions from the input, line by line."""
    while True:
        if sys.stdin.isatty():
            errors().print("question (empty to end): ", end="")
        if not (line := sys.stdin.readline()) or (sys.stdin.isatty() and not line.strip()):
            return
        if line.strip():
            yield line.strip()


def _about(asked: Asked, refused: Sequence[str]) -> Table:
    link = asked.report["link"]
    reused = link["exact_tokens"] + link["approximate_tokens"]
    uses = [*([link["prefix"]] if link["prefix"] else []), *link["chunks"]]
    tiers = {use["source"] for use in uses if use["source"] != "computed"}
    retrieval = f"query cache miss, index searched, {asked.retrieval_ms:.0f} ms"
    if asked.hit:
        retrieval = f"query cache hit at distance {asked.distance:.3f}, {asked.retrieval_ms:.0f} ms"
    rows = {
        "sources": ", ".join(asked.sources),
        "retrieval": retrieval,
        "prompt": f"{link['prompt_tokens']} tokens: {reused} reused"
        + (f" from {' and '.join(sorted(tiers))} ({link['exact_tokens']} exactly)" if reused else "")
        + f", {link['recomputed_tokens']} recomputed, {link['computed_tokens']} computed",
        "answer": f"first token after {asked.report['ttft_ms']:.0f} ms, "
        f"{asked.report['output_tokens']} tokens in {asked.report['total_ms']:.0f} ms",
        "fell back": link["fallback"] or "",
        "notes": "; ".join(link["notes"]),
        "not kept": f"all of it by {' and '.join(refused)}: too small (--disk-gb), full or failing"
        if refused
        else "",
    }
    return pairs(rows)


def _changes(new: int, kept: int, forgotten: int) -> str:
    return f"{new} new, {kept} kept, {forgotten} forgotten"


def _amount(work: Work) -> Table:
    for skipped in work.notes:
        note(skipped)
    rows = {
        "corpus": f"{counted(work.files, 'file')}, {counted(work.chunks, 'chunk')}, {work.tokens} tokens",
        "KV of a token": size(work.token_bytes),
        "stored already": counted(work.stored, "chunk"),
        "to encode": f"{counted(work.chunks - work.stored, 'chunk')}, {work.todo_tokens} tokens, "
        f"{size(work.todo_bytes)} of KV",
    }
    if work.seconds is not None:
        rows["time to encode"] = f"about {work.seconds:.1f} s, from a few prefills"
    return pairs(rows)


def _estimated(log: dict[str, Any]) -> Table:
    foreign = log["chunks_not_in_corpus"]
    rows = {
        "questions": f"{log['questions']}, {log['repeated']} asked before",
        "prompts": f"{log['prompt_tokens']:.0f} tokens (median); {log['chunk_token_share']:.0%} of all "
        "tokens are chunks, the rest is computed every time",
        "chunks": f"{log['chunk_uses']} uses of {log['chunks_touched']} different ones "
        f"({log['chunk_reuse']:.0%} of the uses come back); the corpus has {log['chunks_in_corpus']}"
        + (f", {foreign} of those used not among them" if foreign else ""),
        "KV": f"{size(log['kv_bytes_touched'])} that the log touches, {size(log['kv_bytes_corpus'])} of the "
        "corpus",
    }
    return pairs(rows)
