"""demo: the sample model over Python's documentation, with both caches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from ragcachekit.commands.console import quiet_loading


def demo(
    quick: Annotated[
        bool, typer.Option("--quick", help="Three questions: shows that all works, its figures mean nothing.")
    ] = False,
    full: Annotated[
        bool, typer.Option("--full", help="All of the documentation, not its first 600 chunks.")
    ] = False,
    out: Annotated[Path, typer.Option("--out", help="Folder for results, picture and embeddings.")] = Path(
        "demo-out"
    ),
) -> None:
    """SmolLM2 answers from Python's documentation: answers, first-token times, query cache, one picture.

    An interrupted demo continues where it stopped.
    """
    if quick and full:
        raise ValueError("give --quick or --full, not both")
    from benchmarks.demo import run as module
    from benchmarks.demo.corpus import QUICK, Settings

    quiet_loading()
    settings = QUICK if quick else Settings()
    module.run(replace(settings, chunks=None) if full else settings, out)
