"""Pictures of the fidelity bench: quality over recompute ratio, and the sweeps."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ragcachekit.bench.fidelity_engines import FULL, NO_ENCODER, REUSE
from ragcachekit.bench.fidelity_rows import ALL, QUALITY
from ragcachekit.bench.fidelity_sweeps import CHUNKS, NEEDLE
from ragcachekit.bench.report import BenchReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MARKERS = "osD^vPX*"
_LINES = {FULL: ("full", "#4d4d4d", "-"), REUSE: ("reuse on system", "#e08e45", "--")}
_POINTS: dict[str, Any] = {
    "marker": "o",
    "markersize": 4,
    "linewidth": 1,
    "elinewidth": 0.8,
    "capsize": 2,
}
_Row = dict[str, Any]


def plot(report: BenchReport, path: str | os.PathLike[str]) -> None:
    """Draw what the report holds; the name's ending says which kind of image.

    F1 over the ratio truly spent, one panel per question type, one colour per family of policies, one
    mark per encoder, ``full`` and ``reuse`` as lines with their intervals as bands; for ``needle`` one
    map per policy; for ``chunks`` F1 over the number and the size of chunks.

    Raises
    ------
    ValueError
        If there is nothing to draw.
    """
    drawings = {QUALITY: _quality, NEEDLE: _needle, CHUNKS: _chunks}
    for part, draw in drawings.items():
        rows = [row for row in report.rows if row["part"] == part]
        if rows:
            draw(rows, report.model).savefig(path, dpi=150)
            return
    raise ValueError("the report has no rows to draw")


def family(policy: str) -> str:
    """``lego:4+query:0.1`` -> ``lego+query``."""
    return "+".join(part.partition(":")[0] for part in policy.split("+"))


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure  # not pyplot, which keeps figures in a global list

    return Figure(figsize=(width, height), layout="constrained")


def _colours(names: Sequence[str]) -> dict[str, Any]:
    from matplotlib import colormaps

    return {name: colormaps["tab10" if len(names) <= 10 else "tab20"](i) for i, name in enumerate(names)}


def _quality(rows: Sequence[_Row], model: str) -> Figure:
    kinds = [kind for kind in dict.fromkeys(row["question_type"] for row in rows) if kind != ALL]
    kinds = [ALL, *kinds] if len(kinds) > 1 else [ALL]
    figure = _figure(1.5 + 4 * min(2, len(kinds)), 1.5 + 3 * -(-len(kinds) // 2))
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


def _quality_panel(axes: Axes, rows: Sequence[_Row]) -> None:
    for way, (label, colour, style) in _LINES.items():
        for row in rows:
            if (row["policy"], row["encoder"]) == (way.policy, way.encoder):
                axes.axhline(row["f1"], color=colour, linestyle=style, label=label)
                axes.axhspan(row["low"], row["high"], color=colour, alpha=0.12, linewidth=0)
    others = [row for row in rows if row["policy"] != FULL.policy and not _is_reuse(row)]
    colours = _colours(list(dict.fromkeys(family(row["policy"]) for row in others)))
    encoders = list(dict.fromkeys(row["encoder"] for row in others))
    for line in dict.fromkeys((family(row["policy"]), row["encoder"]) for row in others):
        points = [row for row in others if (family(row["policy"]), row["encoder"]) == line]
        points.sort(key=lambda row: row["ratio_spent"])
        axes.errorbar(
            [row["ratio_spent"] for row in points],
            [row["f1"] for row in points],
            _bars(points),
            color=colours[line[0]],
            **{**_POINTS, "marker": _MARKERS[encoders.index(line[1]) % len(_MARKERS)]},
            label=" on ".join(line) if len(encoders) > 1 else line[0],
        )
    axes.set_xlabel("recompute ratio spent")
    axes.set_ylabel("F1")
    axes.set_xlim(left=-0.01)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _is_reuse(row: _Row) -> bool:
    return (row["policy"], row["encoder"]) == (REUSE.policy, REUSE.encoder)


def _bars(rows: Sequence[_Row]) -> list[list[float]]:
    # Rounding must not make a bar negative where the interval ends at the value.
    return [
        [max(0.0, row["f1"] - row["low"]) for row in rows],
        [max(0.0, row["high"] - row["f1"]) for row in rows],
    ]


def _needle(rows: Sequence[_Row], model: str) -> Figure:
    rows = [row for row in rows if row["question_type"] == ALL]
    ways = list(dict.fromkeys((row["policy"], row["encoder"]) for row in rows))
    wide = min(3, len(ways))
    figure = _figure(1 + 3.2 * wide, 0.8 + 2.6 * -(-len(ways) // wide))
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
        axes.set_title(_name(way), fontsize=9)
        axes.set_xlabel("chunks in the prompt")
        axes.set_ylabel("chunks before the evidence")
    for axes in panels[len(ways) :]:
        axes.set_visible(False)
    if image is not None:
        figure.colorbar(image, ax=panels.tolist(), label="exact match", shrink=0.8)
    figure.suptitle(f"{model}: needle in a haystack", fontsize=10)
    return figure


def _chunks(rows: Sequence[_Row], model: str) -> Figure:
    rows = [row for row in rows if row["question_type"] == ALL]
    figure = _figure(10, 4.2)
    ways = list(dict.fromkeys((row["policy"], row["encoder"]) for row in rows))
    colours = _colours([_name(way) for way in ways])
    panels = figure.subplots(1, 2, sharey=True)
    for axes, axis in zip(panels, ("number", "size"), strict=True):
        chosen = [row for row in rows if row["axis"] == axis]
        cells = sorted({(row["chunks"], row["size"]) for row in chosen})
        for number, way in enumerate(ways):
            line = [row for row in chosen if (row["policy"], row["encoder"]) == way]
            aside = 0.3 * ((number + 0.5) / len(ways) - 0.5)  # so that equal values are seen
            places = [cells.index((row["chunks"], row["size"])) + aside for row in line]
            name = _name(way)
            axes.errorbar(
                places, [row["f1"] for row in line], _bars(line), color=colours[name], label=name, **_POINTS
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


def _name(way: tuple[str, str]) -> str:
    return way[0] if way[1] == NO_ENCODER else " on ".join(way)
