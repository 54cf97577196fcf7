"""near-misses: questions that look alike and ask for different things."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ragcachekit.commands.console import quiet_loading, show, written
from ragcachekit.commands.options import Json, Seed


def near_misses(
    squad: Annotated[
        Path, typer.Argument(help="Questions in the format of SQuAD 2.0, such as dev-v2.0.json.")
    ],
    develop: Annotated[
        bool, typer.Option("--develop", help="The half of the articles that the guard was made on.")
    ] = False,
    lowered: Annotated[bool, typer.Option("--lower", help="Questions without capitals.")] = False,
    seed: Seed = 0,
    json: Json = None,
) -> None:
    """Wrong hits of near misses and kept rewordings, with and without the guard on the text."""
    from benchmarks.near_misses import run as module
    from benchmarks.near_misses.pairs import DEVELOP, REPORT

    quiet_loading()
    half = DEVELOP if develop else REPORT
    report = module.run(squad, half=half, lowered=lowered, seed=seed, progress=True)
    for part in (module.NEAR, module.SAME, module.TIME):
        show(report.part(part).table(f"{part} ({half} half)"))
    written(report, json)
