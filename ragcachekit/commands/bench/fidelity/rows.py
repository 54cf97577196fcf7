"""Rows and tables of the fidelity bench: means with bootstrap intervals, by question type."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from ragcachekit.commands.bench.fidelity.engines import ALONE, FULL, REUSE, Way
from ragcachekit.commands.bench.fidelity.measure import Measurement
from ragcachekit.commands.bench.fidelity.questions import FidelityQuestion
from ragcachekit.commands.bench.report import BenchReport, table
from ragcachekit.commands.bench.resample import Bootstrap, Statistic

ALL = "all"
QUALITY = "quality"
_MEANS = (
    *("exact_match", "f1", "rouge_l", "agreement", "agreement_rouge_l", "agreement_jaccard"),
    *("answer_tokens", "kl", "answer_kl", "answer_loss", "gold_loss"),
    *("attention_deviation", "ratio_spent", "prompt_tokens", "recomputed_tokens", "reused_tokens"),
)
RECOVERED = ("kl", "answer_kl", "gold_loss", "f1")
DEVIATIONS = ("key_deviation", "value_deviation")
_QUALITY = (
    *("policy", "encoder", "question_type", "ratio_asked", "ratio_spent", "exact_match"),
    *("f1", "low", "high", "normalized_f1", "rouge_l", "n"),
)
_AGAINST_FULL = (
    *("policy", "encoder", "ratio_spent", "agreement", "agreement_rouge_l", "kl", "answer_kl", "answer_loss"),
    *("gold_loss", "key_deviation", "value_deviation", "attention_deviation"),
    *("prompt_tokens", "recomputed_tokens"),
)
_RECOVERY = (
    *("policy", "encoder", "ratio_spent"),
    *(f"{name}_recovery{end}" for name in RECOVERED for end in ("", "_low", "_high")),
)

Row = dict[str, Any]
Results = dict[Way, list[Measurement]]
"""Per way one result per question, in the order of the questions."""


def quality_rows(questions: Sequence[FidelityQuestion], results: Results, seed: int) -> list[Row]:
    """One row per way and question type, and one of all; ``low`` and ``high`` are the interval of ``f1``."""
    kinds = sorted({question.question_type for question in questions} - {""})
    members = {kind: [i for i, q in enumerate(questions) if q.question_type == kind] for kind in kinds}
    members[ALL] = list(range(len(questions)))
    bootstraps = {kind: Bootstrap(len(inside), seed) for kind, inside in members.items()}
    return [
        _row(kind, way, {w: [all_of[i] for i in inside] for w, all_of in results.items()}, bootstraps[kind])
        for way in results
        for kind, inside in members.items()
    ]


def tables(report: BenchReport) -> Iterator[Table]:
    """Quality by question type, and agreement with ``full``."""
    if rows := report.part(QUALITY).rows:
        yield table(f"Fidelity: {report.model}", rows, _QUALITY)
        whole = [row for row in rows if row["question_type"] == ALL]
        yield table("Against full, all questions", whole, _AGAINST_FULL)
        yield table(
            "Recovered of what reuse of standalone chunks loses, with 95 % intervals", whole, _RECOVERY
        )


def ratio_asked(policy: str) -> float | None:
    """The ratio written in a policy's name (``query:0.15``, ``lego:4+query:0.1``), where there is one.

    Whole numbers are no ratios: ``lego:16`` counts tokens.
    """
    arguments = [part.partition(":")[2] for part in policy.split("+")]
    found = [float(argument) for argument in arguments if _is_ratio(argument)]
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


def _row(kind: str, way: Way, results: Results, bootstrap: Bootstrap) -> Row:
    found = results[way]
    row: Row = {
        "part": QUALITY,
        "policy": way.policy,
        "encoder": way.encoder,
        "question_type": kind,
        "ratio_asked": ratio_asked(way.policy),
    }
    for name in (*_MEANS, *DEVIATIONS):  # of a deviation the mean over layers
        row |= mean_row(name, np.array([np.mean(getattr(one, name)) for one in found]), bootstrap)
    row |= _relative_row(
        "normalized_f1", "f1", normalized_f1, [results[w] for w in (way, REUSE, FULL)], bootstrap
    )
    ways = [results[w] for w in (way, ALONE, FULL)] if ALONE in results else []
    for name in RECOVERED:
        row |= _relative_row(f"{name}_recovery", name, recovery, ways, bootstrap)
    row["low"], row["high"] = row.pop("f1_low"), row.pop("f1_high")
    return {**row, "n": len(found)}


def _relative_row(
    name: str, metric: str, statistic: Statistic, ways: Sequence[Sequence[Measurement]], bootstrap: Bootstrap
) -> dict[str, float | None]:
    """A figure of the sums of ``metric`` over these ways, with its interval; None without ways or value."""
    if not ways:
        return {name: None, f"{name}_low": None, f"{name}_high": None}
    columns = np.array([[getattr(one, metric) for one in found] for found in ways]).T
    value = float(statistic(columns.sum(axis=0, keepdims=True))[0])
    interval = None if np.isnan(value) else bootstrap.interval(columns, statistic)
    low, high = interval or (None, None)
    return {name: None if np.isnan(value) else value, f"{name}_low": low, f"{name}_high": high}


def mean_row(name: str, values: NDArray[np.float64], bootstrap: Bootstrap) -> dict[str, float]:
    """The mean of ``values`` ``[n]`` with its 95 % interval."""
    low, high = bootstrap.of_mean(values)
    return {name: float(values.mean()), f"{name}_low": low, f"{name}_high": high}


def _is_ratio(argument: str) -> bool:
    try:
        return "." in argument and 0 <= float(argument) <= 1
    except ValueError:
        return False
