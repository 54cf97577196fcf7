"""store: the disk tier against the bare file system."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ragcachekit.commands.console import note, show, written
from ragcachekit.commands.options import Json, Plot, Seed, numbers


def store(
    sizes: Annotated[
        str, typer.Option("--sizes", help="Of entries, in MB, with commas between.")
    ] = "1,4,16,64",
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Pairs of timings of each row.")] = 9,
    entries: Annotated[
        int, typer.Option("--entries", min=0, help="For the bookkeeping, at least 20; 0: leave it out.")
    ] = 10_000,
    requests: Annotated[int, typer.Option("--requests", min=1, help="For the bookkeeping.")] = 1000,
    folder: Annotated[
        Path | None, typer.Option("--folder", help="On the disk to measure; default: the temporary folder.")
    ] = None,
    seed: Seed = 0,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """Read and write throughput of the disk tier beside raw files, and the cost of finding chunks."""
    from benchmarks.store import run as module
    from ragcachekit.commands.report import table

    sizes_mb = numbers("--sizes", sizes)
    if not sizes_mb or min(sizes_mb) <= 0 or 0 < entries < 20:
        raise ValueError("--sizes takes numbers > 0 with commas between, --entries 0 or at least 20")
    report = module.run(
        sizes_mb=sizes_mb,
        rounds=rounds,
        entries=entries,
        requests=requests,
        folder=folder,
        seed=seed,
        progress=note,
    )
    titles = {
        module.THROUGHPUT: "Disk tier against raw files (share: median of pairs)",
        module.BOOKKEEPING: "A request's look-ups, tensors aside, in microseconds",
    }
    for part, title in titles.items():
        if rows := [
            {k: v for k, v in row.items() if k != "part"} for row in report.rows if row["part"] == part
        ]:
            show(table(title, rows))
    written(report, json, plot, module.plot)
