"""A picture of the fidelity bench: quality over recompute ratio."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ragcachekit.commands.bench.fidelity.engines import FULL, NO_ENCODER, REUSE
from ragcachekit.commands.bench.fidelity.rows import ALL, QUALITY
from ragcachekit.commands.bench.report import BenchReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MARKERS = "osD^vPX*"
_LINES = {FULL: ("full", "#4d4d4d", "-"), REUSE: ("reuse on system", "#e08e45", "--")}
POINTS: dict[str, Any] = {
    "marker": "o",
    "markersize": 4,
    "linewidth": 1,
    "elinewidth": 0.8,
    "capsize": 2,
}
Row = dict[str, Any]


def plot(report: BenchReport, path: str | os.PathLike[str]) -> None:
    """Draw F1 over the ratio truly spent; the name's ending says which kind of image.

    One panel per question type, one colour per family of policies, one mark per encoder, ``full`` and
    ``reuse`` as lines with their intervals as bands.

    Raises ValueError if there is nothing to draw.
    """
    rows = [row for row in report.rows if row["part"] == QUALITY]
    if not rows:
        raise ValueError("the report has no rows to draw")
    _quality(rows, report.model).savefig(path, dpi=150)


def family(policy: str) -> str:
    """``lego:4+query:0.1`` -> ``lego+query``."""
    return "+".join(part.partition(":")[0] for part in policy.split("+"))


def figure_of(width: float, height: float) -> Figure:
    """An empty figure of so many inches."""
    from matplotlib.figure import Figure  # not pyplot, which keeps figures in a global list

    return Figure(figsize=(width, height), layout="constrained")


def colours_of(names: Sequence[str]) -> dict[str, Any]:
    """One colour per name."""
    from matplotlib import colormaps

    return {name: colormaps["tab10" if len(names) <= 10 else "tab20"](i) for i, name in enumerate(names)}


def _quality(rows: Sequence[Row], model: str) -> Figure:
    kinds = [kind for kind in dict.fromkeys(row["question_type"] for row in rows) if kind != ALL]
    kinds = [ALL, *kinds] if len(kinds) > 1 else [ALL]
    figure = figure_of(1.5 + 4 * min(2, len(kinds)), 1.5 + 3 * -(-len(kinds) // 2))
    panels = np.atleast_1d(figure.subplots(-(-len(kinds) // 2), min(2, len(kinds)), squeeze=False)).ravel()
    for axes, kind in zip(panels, kinds, strict=False):
        chosen = [row for row in rows if row["question_type"] == kind]
        _quality_panel(axes, chosen)
        axes.set_title(f"questions: {kind} (n = {chosen[0]['n']})", fontsize=9)
    for axes in panels[len(kinds) :]:
        axes.set_visible(False)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    figure.suptitle(f"{model}: F1 with 95 % intervals", fontsize=10)
    return figure


def _quality_panel(axes: Axes, rows: Sequence[Row]) -> None:
    for way, (label, colour, style) in _LINES.items():
        for row in rows:
            if (row["policy"], row["encoder"]) == (way.policy, way.encoder):
                axes.axhline(row["f1"], color=colour, linestyle=style, label=label)
                axes.axhspan(row["low"], row["high"], color=colour, alpha=0.12, linewidth=0)
    others = [row for row in rows if row["policy"] != FULL.policy and not _is_reuse(row)]
    colours = colours_of(list(dict.fromkeys(family(row["policy"]) for row in others)))
    encoders = list(dict.fromkeys(row["encoder"] for row in others))
    for line in dict.fromkeys((family(row["policy"]), row["encoder"]) for row in others):
        points = [row for row in others if (family(row["policy"]), row["encoder"]) == line]
        points.sort(key=lambda row: row["ratio_spent"])
        axes.errorbar(
            [row["ratio_spent"] for row in points],
            [row["f1"] for row in points],
            error_bars(points),
            color=colours[line[0]],
            **{**POINTS, "marker": _MARKERS[encoders.index(line[1]) % len(_MARKERS)]},
            label=" on ".join(line) if len(encoders) > 1 else line[0],
        )
    axes.set_xlabel("recompute ratio spent")
    axes.set_ylabel("F1")
    axes.set_xlim(left=-0.01)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _is_reuse(row: Row) -> bool:
    return (row["policy"], row["encoder"]) == (REUSE.policy, REUSE.encoder)


def error_bars(rows: Sequence[Row]) -> list[list[float]]:
    """Distances of F1 to the ends of its interval."""
    # Rounding must not make a bar negative where the interval ends at the value.
    return [
        [max(0.0, row["f1"] - row["low"]) for row in rows],
        [max(0.0, row["high"] - row["f1"]) for row in rows],
    ]


def way_name(way: tuple[str, str]) -> str:
    """``policy on encoder``."""
    return way[0] if way[1] == NO_ENCODER else " on ".join(way)
