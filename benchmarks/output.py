"""What commands of the benchmarks write: JSON, and a picture."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from ragcachekit.commands.report import BenchReport
from ragcachekit.errors import RagCacheError, missing_extra

PICTURES = (".png", ".svg", ".pdf")


def _plot(path: Path | None) -> Path | None:
    if path is None:
        return None
    if path.suffix.lower() not in PICTURES:
        raise ValueError(f"--plot {path}: give a name that ends in {', '.join(PICTURES)}")
    if not path.parent.is_dir():
        raise ValueError(f"--plot {path}: there is no folder {path.parent}")
    if importlib.util.find_spec("matplotlib") is None:
        raise RagCacheError(f"--plot needs matplotlib: {missing_extra('demo', 'matplotlib')}")
    return path


Plot = Annotated[Path | None, typer.Option(callback=_plot, help="Draw a picture here (.png, .svg, .pdf).")]


def written(
    report: BenchReport, json: Path | None, plot: Path | None, draw: Callable[[BenchReport, Path], object]
) -> None:
    """Write the report's JSON and draw its picture, if their paths are given."""
    if json is not None:
        report.write_json(json)
    if plot is not None:
        draw(report, plot)
