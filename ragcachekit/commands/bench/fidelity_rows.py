"""Rows, tables and the picture of the fidelity bench: means with bootstrap intervals, by question type."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from ragcachekit.commands.bench.report import BenchReport, table
from ragcachekit.commands.bench.resample import Bootstrap, Statistic
from ragcachekit.commands.datasets import Question
from ragcachekit.commands.engines import FULL
from ragcachekit.policies.measured import PolicyAndEncoder

REUSE = PolicyAndEncoder("reuse", "system")
BASELINES = (FULL, REUSE)
"""Always measured: FusionRAG's normalized F1 is relative to them."""

ALONE = PolicyAndEncoder("reuse", "standalone")
"""Measured with a dataset: recovery is relative to ``full`` and to this."""

ALL, QUALITY = "all", "quality"
RECOVERED = ("kl", "answer_kl", "gold_loss", "f1")
_MEANS = (
    *("exact_match", "f1", "agreement", "answer_tokens"),
    *("kl", "answer_kl", "answer_loss", "gold_loss"),
    *("ratio_spent", "prompt_tokens", "recomputed_tokens", "reused_tokens"),
)
_QUALITY = (
    *("policy", "encoder", "question_type", "ratio_asked", "ratio_spent", "exact_match"),
    *("f1", "low", "high", "normalized_f1", "n"),
)
_AGAINST_FULL = (
    *("policy", "encoder", "ratio_spent", "agreement"),
    *("kl", "answer_kl", "answer_loss", "gold_loss", "prompt_tokens", "recomputed_tokens"),
)
_RECOVERY = (
    *("policy", "encoder", "ratio_spent"),
    *(f"{name}_recovery{end}" for name in RECOVERED for end in ("", "_low", "_high")),
)
_PANELS = {
    "answer_kl": "KL(full || reuse) per token of full's answer (nats)",
    "gold_loss": "loss of the right answer (nats per token)",
    "f1": "F1 against the right answer",
}

Row = dict[str, Any]


@dataclass(frozen=True)
class Measurement:
    """Result of one question with one policy and encoder; plain values only.

    ``exact_match`` and ``f1`` are against the right answer, ``agreement`` against that of ``full``.
    ``kl`` is KL(full || this) of the first token in nats, ``answer_kl`` its mean over the tokens of full's
    answer, given those before. ``answer_loss`` and ``gold_loss`` are nats per token of full's and of the
    right answer. ``ratio_spent`` is recomputed / cached rows over all layers.
    """

    text: str
    exact_match: float
    f1: float
    agreement: float
    answer_tokens: int
    kl: float
    answer_kl: float
    answer_loss: float
    gold_loss: float
    ratio_spent: float
    prompt_tokens: int
    recomputed_tokens: int
    reused_tokens: int


Results = dict[PolicyAndEncoder, list[Measurement]]
"""One result per question, in the order of the questions."""


def quality_rows(questions: Sequence[Question], results: Results, seed: int) -> list[Row]:
    """One row per way and question type, and one of all; ``low`` and ``high`` are the interval of ``f1``."""
    kinds = sorted({question.question_type for question in questions} - {""})
    members = {kind: [i for i, q in enumerate(questions) if q.question_type == kind] for kind in kinds}
    members[ALL] = list(range(len(questions)))
    bootstraps = {kind: Bootstrap(len(inside), seed) for kind, inside in members.items()}
    return [
        _row(kind, way, {w: [found[i] for i in inside] for w, found in results.items()}, bootstraps[kind])
        for way in results
        for kind, inside in members.items()
    ]


def ratio_asked(policy: str) -> float | None:
    """The ratio written in a policy's name (``query:0.15``, ``lego:4+query:0.1``), where there is one.

    Whole numbers are no ratios: ``lego:16`` counts tokens.
    """
    arguments = [part.partition(":")[2] for part in policy.split("+")]
    found = [float(argument) for argument in arguments if "." in argument and 0 <= float(argument) <= 1]
    return found[0] if len(found) == 1 else None


def recovery(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    """(x - reuse) / (full - reuse) of columns x, reuse, full; NaN where reuse and full are the same."""
    value, reuse, full = sums.T
    gap = full - reuse
    out: NDArray[np.float64] = np.full(len(gap), np.nan)
    np.divide(value - reuse, gap, out=out, where=np.abs(gap) > 1e-9)
    return out


def normalized_f1(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    """:func:`recovery` of F1; NaN where full is no better than reuse.

    FusionRAG, section 5; F1_reuse is that of encoder ``system`` and policy ``reuse``.
    """
    return np.where(sums[:, 2] - sums[:, 1] > 1e-9, recovery(sums), np.nan)


def _row(kind: str, way: PolicyAndEncoder, results: Results, bootstrap: Bootstrap) -> Row:
    found = results[way]
    row: Row = {
        "part": QUALITY,
        "policy": way.policy,
        "encoder": way.encoder,
        "question_type": kind,
        "ratio_asked": ratio_asked(way.policy),
    }
    for name in _MEANS:
        values = np.array([getattr(one, name) for one in found], np.float64)
        low, high = bootstrap.of_mean(values)
        row |= {name: float(values.mean()), f"{name}_low": low, f"{name}_high": high}
    row |= _relative(
        "normalized_f1", "f1", normalized_f1, [results[w] for w in (way, REUSE, FULL)], bootstrap
    )
    ways = [results[w] for w in (way, ALONE, FULL)] if ALONE in results else []
    for name in RECOVERED:
        row |= _relative(f"{name}_recovery", name, recovery, ways, bootstrap)
    row["low"], row["high"] = row.pop("f1_low"), row.pop("f1_high")
    return {**row, "n": len(found)}


def _relative(
    name: str, metric: str, statistic: Statistic, ways: Sequence[Sequence[Measurement]], bootstrap: Bootstrap
) -> dict[str, float | None]:
    """A figure of the sums of ``metric`` over these ways, with its interval; None without ways or value."""
    value, low, high = np.nan, None, None
    if ways:
        columns = np.array([[getattr(one, metric) for one in found] for found in ways]).T
        value = float(statistic(columns.sum(axis=0, keepdims=True))[0])
    if not np.isnan(value):
        low, high = bootstrap.interval(columns, statistic) or (None, None)
    return {name: None if np.isnan(value) else value, f"{name}_low": low, f"{name}_high": high}


def tables(report: BenchReport) -> Iterator[Table]:
    """Quality by question type, agreement with ``full``, and what is recovered of the loss of reuse."""
    rows = report.part(QUALITY).rows
    whole = [row for row in rows if row["question_type"] == ALL]
    yield table(f"Fidelity: {report.model}", rows, _QUALITY)
    yield table("Against full, all questions", whole, _AGAINST_FULL)
    yield table("Recovered of what reuse of standalone chunks loses, with 95 % intervals", whole, _RECOVERY)


def plot(report: BenchReport, path: str | os.PathLike[str]) -> None:
    """Draw each metric over the ratio spent, with 95 % intervals; ``full`` is a level line.

    ValueError if there is nothing to draw.
    """
    from matplotlib.figure import Figure  # not pyplot, which keeps figures in a global list

    rows = [row for row in report.part(QUALITY).rows if row["question_type"] == ALL]
    if not rows:
        raise ValueError("the report has no rows to draw")
    figure = Figure(figsize=(4.6 * len(_PANELS), 5), layout="constrained")
    for axes, (metric, title) in zip(figure.subplots(1, len(_PANELS)), _PANELS.items(), strict=True):
        lines: dict[str, list[Row]] = {}
        for row in sorted(rows, key=lambda row: float(row["ratio_spent"])):
            family = "+".join(part.partition(":")[0] for part in row["policy"].split("+"))
            lines.setdefault(f"{family} on {row['encoder']}", []).append(row)
        axes.axhline(lines.pop(f"{FULL}")[0][metric], color="#4d4d4d", linewidth=1, label="full")
        ends = ("low", "high") if metric == "f1" else (f"{metric}_low", f"{metric}_high")
        for label, points in lines.items():
            middle, low, high = (np.array([row[name] for row in points]) for name in (metric, *ends))
            spread = np.maximum(0, [middle - low, high - middle])
            axes.errorbar(
                [row["ratio_spent"] for row in points], middle, spread, label=label, marker="o", capsize=2
            )
        axes.set(title=title, xlabel="recompute ratio spent")
        axes.grid(alpha=0.25)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    figure.suptitle(f"{report.model}, {rows[0]['n']} questions, 95 % intervals", fontsize=10)
    figure.savefig(path, dpi=150)
