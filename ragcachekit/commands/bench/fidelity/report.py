"""The fidelity bench on the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.table import Table

from ragcachekit.commands.bench.fidelity.rows import ALL, LAYER, QUALITY
from ragcachekit.commands.bench.report import BenchReport, table

_WAY = ("policy", "encoder")
_QUALITY = (
    *_WAY,
    "question_type",
    "ratio_asked",
    "ratio_spent",
    "exact_match",
    "f1",
    "low",
    "high",
    "normalized_f1",
    "rouge_l",
    "n",
)
_AGAINST_FULL = (
    *_WAY,
    "agreement",
    "agreement_rouge_l",
    "agreement_jaccard",
    "answer_tokens",
    "kl",
    "key_deviation",
    "value_deviation",
    "prompt_tokens",
    "recomputed_tokens",
)


def tables(report: BenchReport) -> Iterator[Table]:
    """What to show: quality by question type, agreement with ``full``, and the deepest deviations."""
    if rows := _part(report, QUALITY):
        yield table(f"Fidelity: {report.model}", rows, _QUALITY)
        whole = [row for row in rows if row["question_type"] == ALL]
        yield table("Against full, all questions", whole, _AGAINST_FULL)
        yield _layers(_part(report, LAYER))


def _layers(rows: Sequence[dict[str, Any]]) -> Table:
    """One line per way, one column per layer: keys / values."""
    lines: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        line = lines.setdefault((row["policy"], row["encoder"]), {name: row[name] for name in _WAY})
        line[f"layer {row['layer']}"] = f"{row['key_deviation']:.2g} / {row['value_deviation']:.2g}"
    return table("Deviation of chunk keys / values from full, relative", list(lines.values()))


def _part(report: BenchReport, name: str) -> list[dict[str, Any]]:
    return [row for row in report.rows if row["part"] == name]
