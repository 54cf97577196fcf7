"""What the demo prints: answers side by side, then the figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from benchmarks.demo import first_token, query_hits
from benchmarks.demo.questions import Question
from benchmarks.demo.score import Answered
from ragcachekit.commands.bench.report import BenchReport, machine
from ragcachekit.commands.console import show

NAMES = {
    first_token.FULL: "full prefill",
    "cold": "cold: nothing cached",
    "host": "warm: from memory",
    "disk": "from disk",
    "restart": "after a restart, from disk",
}
_COLUMNS = (
    "state",
    "ttft_ms",
    "ttft_ms_min",
    "ttft_ms_max",
    "speedup",
    "prompt_tokens",
    "reused_tokens",
    "n",
)


def corpus(chunks: int, vectors: int, asked: Sequence[Question], missing: Sequence[Question]) -> None:
    """What is asked of what; questions that this Python's documentation does not answer are named."""
    show(
        f"[bold]SmolLM2-135M-Instruct[/] answers {len(asked)} questions from {chunks} chunks of the "
        f"documentation of Python's standard library (Faiss, {vectors:,} vectors, random fillers included)"
    )
    for question in missing:
        show(f"  left out, its answer is not in these chunks: {escape(question.text)}")


def answers(answered: Sequence[Answered]) -> None:
    """Question, answer of full, answer with both caches."""
    title = "Answers (* has the known answer; both caches: '=' is the same text as full)"
    table = Table(title=title, title_justify="left", show_lines=True)
    for name, width in (("question", 38), ("known", 16), ("full", 40), ("both caches", 40)):
        table.add_column(name, width=width, overflow="fold")
    for one in answered:
        cached = "=" if one.same else escape(one.cached)
        table.add_row(
            *(escape(one.question), escape(one.known)),
            f"{'* ' * one.full_right}{escape(one.full)}",
            f"{'* ' * one.cached_right}{cached}",
        )
    show(table)


def figures(report: BenchReport) -> None:
    """First-token times, quality and the query cache."""
    times = [{**row, "state": NAMES[row["state"]]} for row in report.part(first_token.PART).rows]
    cores = machine()
    title = f"Time to the first token in ms, medians; {cores['processor']}, {cores['threads']} threads"
    show(BenchReport(report.bench, report.model, 0, tuple(times)).table(title, _COLUMNS))
    for line in (*_quality(report.part("quality").rows[0]), *_queries(report.part(query_hits.PART).rows[0])):
        show(line)
    show(report.part(query_hits.SWEEP).table("Query cache by tolerance"))


def end(seconds: float, out: Path, names: Sequence[str]) -> None:
    """Where the results are, and how long they took."""
    show(f"Wrote {' and '.join(names)} to {out}; {seconds:.0f} s")


def _quality(row: dict[str, Any]) -> Iterator[str]:
    n = row["n"]
    yield f"[bold]Policy {row['policy']}, encoder {row['encoder']}[/], {n} questions:"
    yield f"  full through the library = the model's own generate, token for token: {n} of {n}"
    yield (
        f"  known answer in the text: full {row['full_right']} of {n} ({_share(row, 'full_right')}), "
        f"both caches {row['cached_right']} of {n} ({_share(row, 'cached_right')})"
    )
    yield (
        f"  against full: F1 {_mean(row, 'f1')}, the same text {row['same']} of {n}; KL of the first token "
        f"{_mean(row, 'kl')} nats; loss of full's answer {_mean(row, 'full_loss')} -> "
        f"{_mean(row, 'cached_loss')} nats per token, {_mean(row, 'loss_added')} more"
    )
    yield (
        f"  {row['tokens_reused']:.0%} of the prompts' tokens reused, {row['recompute_ratio']:.1%} of the "
        f"cached rows recomputed; {row['other_chunks']} of {n} prompts with other chunks, by the query cache"
    )


def _queries(row: dict[str, Any]) -> Iterator[str]:
    yield (
        f"[bold]Query cache[/], {row['n']} wordings: {row['hits']} hits, {row['right']} right, "
        f"{row['wrong']} wrong (another question's entry); {row['harmful']} harmful (the answer's chunk lost)"
    )
    yield (
        f"  tolerance {row['tolerance']:.3f} (cosine), calibrated on {row['calibration_pairs']} wordings of "
        f"other questions; the chunk with the answer found: {row['recall']:.0%} without the cache, "
        f"{row['cached_recall']:.0%} with it"
    )
    hit = "-" if row["hit_ms"] is None else f"{row['hit_ms']:.1f}"
    yield (
        f"  a search takes {row['search_ms']:.1f} ms, a hit {hit} ms, embedding the question "
        f"{row['embed_ms']:.1f} ms either way; all hits together saved {row['saved_ms']:,.0f} ms"
    )


def _mean(row: dict[str, Any], name: str) -> str:
    return f"{row[name]:.3f} ({row[f'{name}_low']:.3f}-{row[f'{name}_high']:.3f})"


def _share(row: dict[str, Any], name: str) -> str:
    return f"{row[f'{name}_low']:.0%}-{row[f'{name}_high']:.0%}"
