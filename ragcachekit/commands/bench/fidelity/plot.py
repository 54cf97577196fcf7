"""Picture of the fidelity bench: what each way loses, over what it recomputes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ragcachekit.commands.bench.fidelity.engines import FULL
from ragcachekit.commands.bench.fidelity.rows import ALL, QUALITY, Row
from ragcachekit.commands.bench.report import BenchReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PANELS = {
    "answer_kl": "KL(full || way) per token of full's answer (nats)",
    "gold_loss": "loss of the right answer (nats per token)",
    "f1": "F1 against the right answer",
}

_MARKERS = "osD^vPX*"


def plot(report: BenchReport, path: str | os.PathLike[str]) -> None:
    """Draw each metric over the ratio truly spent, with 95 % intervals; a colour per policy.

    The marker tells the encoder. ``full`` is a level line. ValueError if there is nothing to draw.
    """
    from matplotlib.figure import Figure  # not pyplot, which keeps figures in a global list

    rows = [row for row in report.part(QUALITY).rows if row["question_type"] == ALL]
    if not rows:
        raise ValueError("the report has no rows to draw")
    figure = Figure(figsize=(4.6 * len(PANELS), 5), layout="constrained")
    for axes, (metric, title) in zip(figure.subplots(1, len(PANELS)), PANELS.items(), strict=True):
        _draw(axes, rows, metric)
        axes.set_title(title, fontsize=9)
        axes.set_xlabel("recompute ratio spent")
        axes.grid(alpha=0.25)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    figure.suptitle(f"{report.model}, {rows[0]['n']} questions, 95 % intervals", fontsize=10)
    figure.savefig(path, dpi=150)


def _draw(axes: Axes, rows: Sequence[Row], metric: str) -> None:
    ends = ("low", "high") if metric == "f1" else (f"{metric}_low", f"{metric}_high")
    lines: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row["policy"] == FULL.policy:
            axes.axhline(row[metric], color="#4d4d4d", linewidth=1, label="full")
        else:
            family = "+".join(part.partition(":")[0] for part in row["policy"].split("+"))
            lines.setdefault((family, row["encoder"]), []).append(row)
    families = list(dict.fromkeys(family for family, _ in lines))
    encoders = list(dict.fromkeys(encoder for _, encoder in lines))
    style: dict[str, Any] = {"markersize": 4, "linewidth": 1, "elinewidth": 0.6, "capsize": 2}
    for (family, encoder), points in lines.items():
        points = sorted(points, key=lambda row: float(row["ratio_spent"]))
        low, high = ([row[end] for row in points] for end in ends)
        middle = [row[metric] for row in points]
        axes.errorbar(
            [row["ratio_spent"] for row in points],
            middle,
            [
                [max(0.0, m - end) for m, end in zip(middle, low, strict=True)],
                [max(0.0, end - m) for m, end in zip(middle, high, strict=True)],
            ],
            color=f"C{families.index(family) % 10}",
            marker=_MARKERS[encoders.index(encoder) % len(_MARKERS)],
            linestyle="-" if encoders.index(encoder) else ":",
            label=f"{family} on {encoder}",
            **style,
        )
