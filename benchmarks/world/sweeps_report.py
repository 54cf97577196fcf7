"""The sweeps of the fidelity bench on the terminal and as pictures."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table

from benchmarks.world.layers import LAYER, layer_table
from benchmarks.world.sweeps import CHUNKS, NEEDLE
from ragcachekit.commands.bench.fidelity import rows as fidelity_rows
from ragcachekit.commands.bench.fidelity.engines import FULL, NO_ENCODER, REUSE
from ragcachekit.commands.bench.fidelity.rows import ALL, QUALITY, Row
from ragcachekit.commands.bench.report import BenchReport, table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_CELLS = {NEEDLE: ("chunks", "position"), CHUNKS: ("axis", "size", "chunks")}
_MARKERS = "osD^vPX*"
_LINES = {FULL: ("full", "#4d4d4d", "-"), REUSE: ("reuse on system", "#e08e45", "--")}
_BASELINES = {(way.policy, way.encoder): style for way, style in _LINES.items()}
_POINTS: dict[str, Any] = {"markersize": 4, "linewidth": 1, "elinewidth": 0.8, "capsize": 2}


def tables(report: BenchReport) -> Iterator[Table]:
    """One table per sweep, else those of the fidelity bench and the deviations by layer."""
    yield from fidelity_rows.tables(report)
    if layers := report.part(LAYER).rows:
        yield layer_table(layers)
    for part, cells in _CELLS.items():
        rows = [r for r in report.rows if r["part"] == part and r["question_type"] == ALL]
        if rows:
            columns = ("policy", "encoder", *cells)
            columns += ("ratio_spent", "exact_match", "f1", "low", "high", "kl", "n")
            yield table(f"Sweep {part}: {report.model}", rows, columns)


def plot(report: BenchReport, path: str | os.PathLike[str]) -> None:
    """Draw what the report holds; the name's ending says which kind of image.

    For ``needle`` one map per policy; for ``chunks`` F1 over the number and the size of chunks; else F1
    over the ratio truly spent, one panel per question type.

    Raises
    ------
    ValueError
        If there is nothing to draw.
    """
    for part, draw in ((NEEDLE, _needle), (CHUNKS, _chunks), (QUALITY, _quality)):
        if rows := [row for row in report.rows if row["part"] == part]:
            draw(rows, report.model).savefig(path, dpi=150)
            return
    raise ValueError("the report has no rows to draw")


def figure_of(width: float, height: float) -> Figure:
    """An empty figure of so many inches."""
    from matplotlib.figure import Figure  # not pyplot, which keeps figures in a global list

    return Figure(figsize=(width, height), layout="constrained")


def colours_of(names: Sequence[str]) -> dict[str, Any]:
    """One colour per name."""
    from matplotlib import colormaps

    return {name: colormaps["tab10" if len(names) <= 10 else "tab20"](i) for i, name in enumerate(names)}


def way_name(way: tuple[str, str]) -> str:
    """``policy on encoder``."""
    return way[0] if way[1] == NO_ENCODER else " on ".join(way)


def _quality(rows: Sequence[Row], model: str) -> Figure:
    kinds = [ALL, *sorted({row["question_type"] for row in rows} - {ALL})]
    figure = figure_of(1.5 + 4 * min(2, len(kinds)), 1.5 + 3 * -(-len(kinds) // 2))
    panels = figure.subplots(-(-len(kinds) // 2), min(2, len(kinds)), squeeze=False).ravel()
    for axes, kind in zip(panels, kinds, strict=False):
        chosen = [row for row in rows if row["question_type"] == kind]
        _draw_quality(axes, chosen)
        axes.set_title(f"questions: {kind} (n = {chosen[0]['n']})", fontsize=9)
    for axes in panels[len(kinds) :]:
        axes.set_visible(False)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    figure.suptitle(f"{model}: F1 with 95 % intervals", fontsize=10)
    return figure


def _draw_quality(axes: Axes, rows: Sequence[Row]) -> None:
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
            _error_bars(points),
            color=f"C{families.index(family)}",
            marker=_MARKERS[encoders.index(encoder) % len(_MARKERS)],
            label=f"{family} on {encoder}",
            **_POINTS,
        )
    axes.set_xlabel("recompute ratio spent")
    axes.set_ylabel("F1")
    axes.grid(alpha=0.25)


def _error_bars(rows: Sequence[Row]) -> list[list[float]]:
    """Distances of F1 to the ends of its interval, not negative by rounding."""
    return [
        [max(0.0, row["f1"] - row["low"]) for row in rows],
        [max(0.0, row["high"] - row["f1"]) for row in rows],
    ]


def _needle(rows: Sequence[Row], model: str) -> Figure:
    rows = [row for row in rows if row["question_type"] == ALL]
    ways = list(dict.fromkeys((row["policy"], row["encoder"]) for row in rows))
    wide = min(3, len(ways))
    figure = figure_of(1 + 3.2 * wide, 0.8 + 2.6 * -(-len(ways) // wide))
    panels = figure.subplots(-(-len(ways) // wide), wide, squeeze=False).ravel()
    lengths, places = (sorted({row[name] for row in rows}) for name in ("chunks", "position"))
    image = None
    for axes, way in zip(panels, ways, strict=False):
        cells = np.full((len(places), len(lengths)), np.nan)
        for row in rows:
            if (row["policy"], row["encoder"]) == way:
                cells[places.index(row["position"]), lengths.index(row["chunks"])] = row["exact_match"]
        image = axes.imshow(cells, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
        for (y, x), value in np.ndenumerate(cells):
            if not np.isnan(value):
                axes.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize=7)
        axes.set_xticks(range(len(lengths)), lengths)
        axes.set_yticks(range(len(places)), places)
        axes.set_title(way_name(way), fontsize=9)
        axes.set_xlabel("chunks in the prompt")
        axes.set_ylabel("chunks before the evidence")
    for axes in panels[len(ways) :]:
        axes.set_visible(False)
    if image is not None:
        figure.colorbar(image, ax=panels.tolist(), label="exact match", shrink=0.8)
    figure.suptitle(f"{model}: needle in a haystack", fontsize=10)
    return figure


def _chunks(rows: Sequence[Row], model: str) -> Figure:
    rows = [row for row in rows if row["question_type"] == ALL]
    figure = figure_of(10, 4.2)
    ways = list(dict.fromkeys((row["policy"], row["encoder"]) for row in rows))
    colours = colours_of([way_name(way) for way in ways])
    panels = figure.subplots(1, 2, sharey=True)
    for axes, axis in zip(panels, ("number", "size"), strict=True):
        chosen = [row for row in rows if row["axis"] == axis]
        cells = sorted({(row["chunks"], row["size"]) for row in chosen})
        for number, way in enumerate(ways):
            line = [row for row in chosen if (row["policy"], row["encoder"]) == way]
            aside = 0.3 * ((number + 0.5) / len(ways) - 0.5)  # so that equal values are seen
            places = [cells.index((row["chunks"], row["size"])) + aside for row in line]
            name = way_name(way)
            axes.errorbar(
                places,
                [row["f1"] for row in line],
                _error_bars(line),
                color=colours[name],
                label=name,
                marker="o",
                **_POINTS,
            )
        labels = [str(n) if axis == "number" else f"{size}\n({n})" for n, size in cells]
        axes.set_xticks(range(len(cells)), labels, fontsize=8)
        axes.grid(alpha=0.25)
    panels[0].set_ylabel("F1")
    panels[0].set_xlabel("chunks in the prompt, all of the usual size")
    panels[1].set_xlabel("size of a chunk (number of chunks); the text is the same")
    panels[0].legend(fontsize=7, frameon=False)
    figure.suptitle(f"{model}: number and size of chunks, 95 % intervals", fontsize=10)
    return figure
