"""Differences per question between one policy and the others over the same encoding, at equal cost.

Reads the work file of ``bench fidelity --resume FILE``. Each other way is compared with the policy at the
ratio that spends most, yet at most one percent of the cached rows more than that way. Differences per
question have narrower intervals than two means: all ways answer the same questions.

    python benchmarks/selection/paired.py squad.work --policy impact
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ragcachekit.cli.console import show
from ragcachekit.commands.bench.report import BenchReport
from ragcachekit.commands.bench.resample import Bootstrap

MORE = 0.01
"""Share of the cached rows that the policy may spend more than the way it is compared with."""

Way = tuple[str, str]
"""Policy and encoder."""
Results = Mapping[Way, Mapping[int, Mapping[str, Any]]]
"""Per way the measurements by question."""


def read(path: Path) -> dict[Way, dict[int, dict[str, Any]]]:
    """Results of a work file; ValueError if it is none."""
    header, *lines = path.read_text(encoding="utf-8").splitlines()
    if "fidelity" not in json.loads(header):
        raise ValueError(f"{path} is no work file of bench fidelity")
    found: dict[Way, dict[int, dict[str, Any]]] = {}
    for line in map(json.loads, lines):
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


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare, show, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--policy", default="impact")
    parser.add_argument("--metric", default="answer_kl", help="of which less is better")
    parser.add_argument("--model", default="sample", help="as the work file was made with")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    report = BenchReport("paired", given.model, 0, tuple(rows(read(given.work), given.policy, given.metric)))
    show(report.table(f"{given.metric} of {given.policy}, less than that of others"))
    if given.json:
        report.write_json(given.json)


if __name__ == "__main__":
    main()
