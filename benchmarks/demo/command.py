"""``python -m benchmarks demo``: what the library does for a small chat model, in short or in full."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.demo import run, tour
from benchmarks.demo.corpus import Settings
from ragcachekit.commands.console import quiet_loading


def demo(
    full: Annotated[
        bool,
        typer.Option(
            "--full", help="30 questions, 600 chunks, all tiers, intervals; takes several times as long."
        ),
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder for results and picture.")] = Path("demo-out"),
) -> None:
    """SmolLM2 answers from Python's documentation, without and with the cache: live, a table, a picture."""
    quiet_loading()
    if full:
        run.run(Settings(), out)
    else:
        tour.run(tour.TOUR, out)
