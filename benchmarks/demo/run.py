"""``python -m benchmarks demo``: a LangChain chain with both caches on, and how much sooner it answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.demo import answers as demo_answers
from benchmarks.demo import plot as demo_plot
from benchmarks.demo import speed as demo_speed
from benchmarks.demo.answers import CHAIN
from benchmarks.demo.score import ALL, KINDS
from ragcachekit.cli.console import show
from ragcachekit.commands.bench.report import BenchReport, table
from ragcachekit.commands.embedding import MiniLM

ANSWERS, SPEED, PLOT = "answers.json", "speed.json", "demo.png"
SPEED_COLUMNS = (
    "policy",
    "state",
    "tier",
    "prompt_tokens",
    "recompute_ratio",
    "ttft_ms",
    "ttft_ms_min",
    "ttft_ms_max",
    "speedup",
    "runs",
)
RETRIEVAL_COLUMNS = (
    "query_cache",
    "evidence_recall",
    "retrieval_ms",
    "hit_ms",
    "miss_ms",
    "embed_ms",
    "total_ms",
    "n",
)


def run(*, out: Path, quick: bool = False, full_manual: bool = False, seed: int = 0) -> None:
    """Run both parts, print their tables, and write two JSON files and a plot.

    Parameters
    ----------
    out : path
        Folder for ``answers.json``, ``speed.json``, ``demo.png`` and the cached embeddings.
    quick : bool
        Few questions and short prompts: shows that all works, its figures mean nothing.
    full_manual : bool
        All of the standard library's manual instead of about 1,000 chunks.
    seed : int
        Of the corpus, the questions and the random weights.

    Raises
    ------
    RagCacheError
        The library's answers are not the model's own where they must be: no figures then.
    OSError
        ``out`` cannot be written.
    """
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    embedder = MiniLM()
    show("[bold]Answers[/]: a small trained reader over the sample corpus, through a LangChain chain")
    sizes = demo_answers.QUICK if quick else None
    answers = demo_answers.run(embedder, sizes=sizes, seed=seed, progress=True)
    answers.write_json(out / ANSWERS)
    show_answers(answers)
    show("\n[bold]Speed[/]: the manual of Python's standard library, timing only")
    speed = demo_speed.run(
        full_manual=full_manual,
        quick=quick,
        cache_dir=out / "cache",
        embedder=embedder,
        seed=seed,
        progress=True,
    )
    speed.write_json(out / SPEED)
    show(speed.table(f"Time to first token, {speed.model}", SPEED_COLUMNS))
    demo_plot.draw(answers, speed, out / PLOT)
    show(f"\n{summary(answers, speed)}\nWrote {ANSWERS}, {SPEED} and {PLOT} to {out}")


def show_answers(answers: BenchReport) -> None:
    """Print exact match by policy, what the query cache did, and what retrieval took."""
    show(answers_table(answers))
    for line in answers_lines(answers):
        show(line)
    show(table("Retrieval in ms (medians)", _part(answers, "retrieval"), RETRIEVAL_COLUMNS))


def answers_table(answers: BenchReport) -> Table:
    """Exact match in per cent by question type, one line per policy, the cached chain last."""
    asked, (queries,) = _part(answers, "policy"), _part(answers, "query-cache")
    lines = []
    for policy in dict.fromkeys(row["policy"] for row in asked):
        found = {row["question_type"]: row for row in asked if row["policy"] == policy}
        lines.append(_line(policy, found) | _spent(found[ALL]["tokens_reused"], found[ALL]["ratio_spent"]))
    chain = {row["question_type"]: row for row in _part(answers, "chain")}
    name = f"{chain[ALL]['policy']} + query cache"
    lines.append(_line(name, chain) | _spent(queries["tokens_reused"], queries["ratio_spent"]))
    return table("Exact match in % (95 % interval), by what the question needs", lines)


def answers_lines(answers: BenchReport) -> Iterator[str]:
    """The query cache and the check, in words."""
    (queries,), (check,) = _part(answers, "query-cache"), _part(answers, "check")
    yield (
        f"Query cache: {queries['hits']} of {queries['n']} lookups hit ({queries['hit_rate']:.1%}); "
        f"{queries['wrong_hits']} wrong hits (on another question's entry), "
        f"{queries['harmful_hits']} of them without a needed chunk."
    )
    yield (
        f"  Tolerance {queries['tolerance']:.3f} (cosine), calibrated on {queries['calibration_pairs']} "
        f"pairs of other questions, at most {queries['max_false_hit_rate']:.0%} false hits among them."
    )
    yield (
        f"Check: full through the library = the model's own generate, token for token, on "
        f"{check['n'] - check['mismatches']} of {check['n']} questions."
    )


def summary(answers: BenchReport, speed: BenchReport) -> str:
    """One line on what was shown, from the rows."""
    (queries,) = _part(answers, "query-cache")
    match = {r["policy"]: r["exact_match"] for r in _part(answers, "policy") if r["question_type"] == ALL}
    warm = {r["policy"]: r["speedup"] for r in speed.rows if r["state"] == "warm" and r["tier"] == "host"}
    matches = ", ".join(f"{match[name]:.1%} with {name}" for name in ("full", CHAIN, "reuse"))
    times = " and ".join(f"{times:.1f}x with {name}" for name, times in warm.items())
    return (
        f"Shown: {queries['hit_rate']:.0%} of the questions needed no search "
        f"({queries['wrong_hits']} wrong hits, {queries['harmful_hits']} of them harmful); "
        f"answers right: {matches}; first token sooner: {times}."
    )


def _part(answers: BenchReport, name: str) -> list[dict[str, Any]]:
    return [row for row in answers.rows if row["part"] == name]


def _line(name: str, found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    cells = {kind: _cell(found[kind]) for kind in (*KINDS, ALL) if kind in found}
    return {"policy": name, **cells, "questions": found[ALL]["questions"], "asked": found[ALL]["n"]}


def _spent(reused: float, ratio: float) -> dict[str, str]:
    return {"tokens_reused": f"{reused:.1%}", "recomputed": f"{ratio:.1%}"}


def _cell(row: dict[str, Any]) -> str:
    return f"{100 * row['exact_match']:.1f} ({100 * row['low']:.0f}-{100 * row['high']:.0f})"
