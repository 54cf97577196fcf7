"""``python -m benchmarks paired``: differences per question between one policy and the others, at equal cost.

Each other way is compared with the policy at the ratio that spends most, yet at most one percent of the
cached rows more than that way. Differences per question have narrower intervals than two means: all ways
answer the same questions.
"""

from __future__ import annotations

import json as json_format
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from ragcachekit.commands import options as opt
from ragcachekit.commands.bench.report import BenchReport
from ragcachekit.commands.bench.resample import Bootstrap
from ragcachekit.commands.console import show, written

MORE = 0.01
"""Share of the cached rows that the policy may spend more than the way it is compared with."""

Way = tuple[str, str]
"""Policy and encoder."""
Results = Mapping[Way, Mapping[int, Mapping[str, Any]]]
"""Per way the measurements by question."""


def paired(
    work: Annotated[Path, typer.Argument(help="Work file of bench fidelity.")],
    policy: str = "impact",
    metric: Annotated[str, typer.Option(help="Of which less is better.")] = "answer_kl",
    model: Annotated[str, typer.Option(help="As the work file was made with.")] = "sample",
    json: opt.Json = None,
) -> None:
    """Differences per question between one policy and the others over the same encoding, at equal cost."""
    report = BenchReport("paired", model, 0, tuple(rows(read(work), policy, metric)))
    show(report.table(f"{metric} of {policy}, less than that of others"))
    written(report, json)


def read(path: Path) -> dict[Way, dict[int, dict[str, Any]]]:
    """Results of a work file; ValueError if it is none."""
    header, *lines = path.read_text(encoding="utf-8").splitlines()
    if "fidelity" not in json_format.loads(header):
        raise ValueError(f"{path} is no work file of bench fidelity")
    found: dict[Way, dict[int, dict[str, Any]]] = {}
    for line in map(json_format.loads, lines):
        way = line["policy"], line["encoder"]
        found.setdefault(way, {})[line["question"]] = line["result"]
    return found


def rows(results: Results, policy: str, metric: str, seed: int = 0) -> list[dict[str, Any]]:
    """One row per other way; ``less`` is how much lower ``metric`` is under ``policy``, by question."""
    out = []
    for way, theirs in sorted(results.items(), key=lambda item: (item[0][1], _ratio(item[1]))):
        if _kind(way) in (policy, "full", "reuse") or not (own := _matching(results, way, policy)):
            continue
        both = sorted(results[own].keys() & theirs.keys())
        ours = results[own]
        less = np.array([theirs[i][metric] - ours[i][metric] for i in both])
        low, high = Bootstrap(len(both), seed).of_mean(less)
        out.append(
            {
                "encoder": way[1],
                "policy": own[0],
                "ratio": _ratio(ours),
                "other": way[0],
                "other_ratio": _ratio(theirs),
                "less": float(less.mean()),
                "low": low,
                "high": high,
                "n": len(both),
            }
        )
    return out


def _matching(results: Results, way: Way, policy: str) -> Way | None:
    """The way of ``policy`` to compare with."""
    most = _ratio(results[way]) + MORE
    own = [w for w in results if _kind(w) == policy and w[1] == way[1] and _ratio(results[w]) <= most]
    return max(own, key=lambda w: _ratio(results[w]), default=None)


def _kind(way: Way) -> str:
    return way[0].partition(":")[0]


def _ratio(found: Mapping[int, Mapping[str, Any]]) -> float:
    return float(np.mean([one["ratio_spent"] for one in found.values()]))
