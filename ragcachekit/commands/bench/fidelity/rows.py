"""Rows and tables of the fidelity bench: means with bootstrap intervals, by question type."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from ragcachekit.commands.bench.fidelity.engines import FULL, REUSE, Way
from ragcachekit.commands.bench.fidelity.measure import Measurement
from ragcachekit.commands.bench.fidelity.questions import FidelityQuestion
from ragcachekit.commands.bench.report import BenchReport, table
from ragcachekit.commands.bench.resample import Bootstrap

ALL = "all"
QUALITY = "quality"
_MEANS = (
    *("exact_match", "f1", "rouge_l", "agreement", "agreement_rouge_l", "agreement_jaccard"),
    *("answer_tokens", "kl", "ratio_spent", "prompt_tokens", "recomputed_tokens", "reused_tokens"),
)
DEVIATIONS = ("key_deviation", "value_deviation")
_QUALITY = (
    *("policy", "encoder", "question_type", "ratio_asked", "ratio_spent", "exact_match"),
    *("f1", "low", "high", "normalized_f1", "rouge_l", "n"),
)
_AGAINST_FULL = (
    *("policy", "encoder", "agreement", "agreement_rouge_l", "agreement_jaccard", "answer_tokens", "kl"),
    *("key_deviation", "value_deviation", "prompt_tokens", "recomputed_tokens"),
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


def ratio_asked(policy: str) -> float | None:
    """The ratio written in a policy's name (``query:0.15``, ``lego:4+query:0.1``), where there is one.

    Whole numbers are no ratios: ``lego:16`` counts tokens.
    """
    arguments = [part.partition(":")[2] for part in policy.split("+")]
    found = [float(argument) for argument in arguments if _is_ratio(argument)]
    return found[0] if len(found) == 1 else None


def normalized_f1(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    """(F1 - F1_reuse) / (F1_full - F1_reuse) of columns f1, f1_reuse, f1_full; NaN where full is no better.

    FusionRAG, section 5; F1_reuse is that of encoder ``system`` and policy ``reuse``.
    """
    f1, reuse, full = sums.T
    gap = full - reuse
    out: NDArray[np.float64] = np.full(len(gap), np.nan)
    np.divide(f1 - reuse, gap, out=out, where=gap > 1e-9)
    return out


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
    columns = np.array([[one.f1 for one in results[w]] for w in (way, REUSE, FULL)]).T
    value = float(normalized_f1(columns.sum(axis=0, keepdims=True))[0])
    row["normalized_f1"] = None if np.isnan(value) else value
    interval = None if np.isnan(value) else bootstrap.interval(columns, normalized_f1)
    row["normalized_f1_low"], row["normalized_f1_high"] = interval or (None, None)
    row["low"], row["high"] = row.pop("f1_low"), row.pop("f1_high")
    return {**row, "n": len(found)}


def mean_row(name: str, values: NDArray[np.float64], bootstrap: Bootstrap) -> dict[str, float]:
    """The mean of ``values`` ``[n]`` with its 95 % interval."""
    low, high = bootstrap.of_mean(values)
    return {name: float(values.mean()), f"{name}_low": low, f"{name}_high": high}


def _is_ratio(argument: str) -> bool:
    try:
        return "." in argument and 0 <= float(argument) <= 1
    except ValueError:
        return False
