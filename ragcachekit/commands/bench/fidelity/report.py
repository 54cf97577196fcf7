"""Tables and the picture of the fidelity bench."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table

from ragcachekit.commands.bench.fidelity.engines import FULL, REUSE
from ragcachekit.commands.bench.fidelity.rows import ALL, QUALITY, Row
from ragcachekit.commands.bench.report import BenchReport, table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_QUALITY = (
    *("policy", "encoder", "question_type", "ratio_asked", "ratio_spent", "exact_match"),
    *("f1", "low", "high", "normalized_f1", "rouge_l", "n"),
)
_AGAINST_FULL = (
    *("policy", "encoder", "agreement", "agreement_rouge_l", "agreement_jaccard", "answer_tokens", "kl"),
    *("key_deviation", "value_deviation", "prompt_tokens", "recomputed_tokens"),
)
_MARKERS = "osD^vPX*"
_LINES = {FULL: ("full", "#4d4d4d", "-"), REUSE: ("reuse on system", "#e08e45", "--")}
_BASELINES = {(way.policy, way.encoder): style for way, style in _LINES.items()}
POINTS: dict[str, Any] = {"markersize": 4, "linewidth": 1, "elinewidth": 0.8, "capsize": 2}


def tables(report: BenchReport) -> Iterator[Table]:
    """Quality by question type, and agreement with ``full``."""
    if rows := report.part(QUALITY).rows:
        yield table(f"Fidelity: {report.model}", rows, _QUALITY)
        whole = [row for row in rows if row["question_type"] == ALL]
        yield table("Against full, all questions", whole, _AGAINST_FULL)


def plot(report: BenchReport, path: str | os.PathLike[str]) -> None:
    """Draw F1 over the ratio spent, all questions; the name's ending says which kind of image.

    Raises ValueError if there is nothing to draw.
    """
    from matplotlib.figure import Figure  # not pyplot, which keeps figures in a global list

    rows = [row for row in report.part(QUALITY).rows if row["question_type"] == ALL]
    if not rows:
        raise ValueError("the report has no rows to draw")
    figure = Figure(figsize=(5.5, 4.5), layout="constrained")
    draw_quality(figure.subplots(), rows)
    figure.legend(loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    figure.suptitle(f"{report.model}: F1 with 95 % intervals, {rows[0]['n']} questions", fontsize=10)
    figure.savefig(path, dpi=150)


def draw_quality(axes: Axes, rows: Sequence[Row]) -> None:
    """One line per kind of policy and encoder; the baselines as level lines with their intervals."""
    lines: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if style := _BASELINES.get((row["policy"], row["encoder"])):
            label, colour, line = style
            axes.axhline(row["f1"], color=colour, linestyle=line, label=label)
            axes.axhspan(row["low"], row["high"], color=colour, alpha=0.12, linewidth=0)
        else:
            family = "+".join(part.partition(":")[0] for part in row["policy"].split("+"))
            lines.setdefault((family, row["encoder"]), []).append(row)
    families, encoders = (
        (list(dict.fromkeys(names)) for names in zip(*lines, strict=True)) if lines else ([], [])
    )
    for (family, encoder), points in lines.items():
        points.sort(key=lambda row: float(row["ratio_spent"]))
        axes.errorbar(
            [row["ratio_spent"] for row in points],
            [row["f1"] for row in points],
            error_bars(points),
            color=f"C{families.index(family)}",
            marker=_MARKERS[encoders.index(encoder) % len(_MARKERS)],
            label=f"{family} on {encoder}",
            **POINTS,
        )
    axes.set_xlabel("recompute ratio spent")
    axes.set_ylabel("F1")
    axes.grid(alpha=0.25)


def error_bars(rows: Sequence[Row]) -> list[list[float]]:
    """Distances of F1 to the ends of its interval, not negative by rounding."""
    return [
        [max(0.0, row["f1"] - row["low"]) for row in rows],
        [max(0.0, row["high"] - row["f1"]) for row in rows],
    ]
