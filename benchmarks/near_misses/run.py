"""How many near misses a query cache would answer wrongly, and how many rewordings the guard costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

from benchmarks.near_misses.pairs import (
    ADVERSARIAL,
    DEVELOP,
    REPORT,
    Pair,
    articles,
    distances,
    lower,
    made_pairs,
    rewordings,
)
from ragcachekit.commands.console import quiet_loading, show, written
from ragcachekit.commands.embedding import MiniLM
from ragcachekit.commands.options import Json, Seed
from ragcachekit.commands.report import BenchReport
from ragcachekit.retrieval.near_misses import near_miss

TOLERANCES = (0.05, 0.1, 0.2)
NEAR, SAME, TIME = "near misses", "rewordings", "time"
_NAME = "questions of SQuAD 2.0, altered by rules and by crowd workers; all-MiniLM-L6-v2, cosine distance"


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
    quiet_loading()
    report = run(squad, DEVELOP if develop else REPORT, lowered, seed, progress=True)
    for part in (NEAR, SAME, TIME):
        show(report.part(part).table(f"{part} ({DEVELOP if develop else REPORT} half)"))
    written(report, json)


def run(
    squad: Path, half: str, lowered: bool = False, seed: int = 0, *, progress: bool = False
) -> BenchReport:
    """Rows of ``part`` near misses and rewordings per kind and tolerance, and one of the guard's time.

    A pair counts as a hit if its distance is within the tolerance, and with the guard if that finds nothing.
    ``lowered`` takes the capitals away. ValueError if ``squad`` is not in the format of SQuAD 2.0.
    """
    found, embedder = articles(squad), MiniLM()
    near = made_pairs(found, embedder, seed, progress)
    pairs = [pair for pair in (*near, *rewordings(near)) if pair.half == half]
    pairs = [lower(pair) for pair in pairs] if lowered else pairs
    far = distances(pairs, embedder, progress)
    refused = np.array([near_miss(pair.one, pair.other) is not None for pair in pairs])
    rows = [*_near_rows(pairs, far, refused), *_same_rows(pairs, far, refused), _time_row(pairs)]
    return BenchReport("near-misses", _NAME, seed, tuple(rows))


def _near_rows(
    pairs: Sequence[Pair], far: NDArray[np.float64], refused: NDArray[np.bool_]
) -> Iterator[dict[str, Any]]:
    """Wrong hits, and their share of all near misses of the kind, near or not."""
    kinds = dict.fromkeys(pair.kind for pair in pairs if not pair.same)
    groups: dict[str, Callable[[str], bool]] = {kind: kind.__eq__ for kind in kinds}
    groups |= {"all by rules": lambda kind: kind != ADVERSARIAL, "all": lambda _: True}
    for name, belongs in groups.items():
        here = np.array([not pair.same and belongs(pair.kind) for pair in pairs])
        for tolerance in TOLERANCES:
            within = here & (far <= tolerance)
            plain, guarded = int(within.sum()), int((within & ~refused).sum())
            yield {
                "part": NEAR, "kind": name, "tolerance": tolerance, "pairs": int(here.sum()),
                "wrong_hits_without": plain, "wrong_hits": guarded,
                "share_without": plain / here.sum(), "share": guarded / here.sum(),
            }  # fmt: skip


def _same_rows(
    pairs: Sequence[Pair], far: NDArray[np.float64], refused: NDArray[np.bool_]
) -> Iterator[dict[str, Any]]:
    """Rewordings within the tolerance, and how many of them the guard keeps."""
    for kind in dict.fromkeys(pair.kind for pair in pairs if pair.same):
        here = np.array([pair.same and pair.kind == kind for pair in pairs])
        for tolerance in TOLERANCES:
            within = here & (far <= tolerance)
            kept = int((within & ~refused).sum())
            yield {
                "part": SAME, "kind": kind, "tolerance": tolerance, "pairs": int(here.sum()),
                "hits_without": int(within.sum()), "hits": kept, "kept": kept / max(1, int(within.sum())),
            }  # fmt: skip


def _time_row(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Microseconds to compare two questions that were not seen before."""
    spent = []
    for pair in pairs:
        start = time.perf_counter_ns()
        near_miss(f"{pair.other} ", f"{pair.one} ")  # not yet read
        spent.append((time.perf_counter_ns() - start) / 1e3)
    return {
        "part": TIME,
        "comparisons": len(spent),
        "us_p50": median(spent),
        "us_p95": quantiles(spent, n=20)[-1],
    }
