"""From single results to the rows of the fidelity bench: means with intervals, by question type and cell."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragcachekit.commands.bench.fidelity.engines import FULL, REUSE, Way
from ragcachekit.commands.bench.fidelity.measure import Measurement
from ragcachekit.commands.bench.fidelity.questions import FidelityQuestion
from ragcachekit.commands.bench.resample import Bootstrap

ALL = "all"
QUALITY, LAYER = "quality", "layer"
_PLAIN = (
    "exact_match",
    "f1",
    "rouge_l",
    "agreement",
    "agreement_rouge_l",
    "agreement_jaccard",
    "answer_tokens",
    "kl",
    "ratio_spent",
    "prompt_tokens",
    "recomputed_tokens",
    "reused_tokens",
)
_DEVIATIONS = ("key_deviation", "value_deviation")

Results = Mapping[Way, Sequence[Measurement]]
"""Per way one result per question, in the order of the questions."""


@dataclass(frozen=True)
class Group:
    """Questions that one row is about: their places in the list, and what the row says of them."""

    cell: tuple[tuple[str, Any], ...]
    question_type: str
    members: tuple[int, ...]


def groups(questions: Sequence[FidelityQuestion]) -> Iterator[Group]:
    """Per cell one group for every question type, and one of all."""
    for cell in sorted({question.cell for question in questions}, key=_order):
        inside = [i for i, question in enumerate(questions) if question.cell == cell]
        for kind in sorted({questions[i].question_type for i in inside} - {""}):
            yield Group(cell, kind, tuple(i for i in inside if questions[i].question_type == kind))
        yield Group(cell, ALL, tuple(inside))


def _order(cell: tuple[tuple[str, Any], ...]) -> tuple[str, int, int]:
    named = dict(cell)
    return named.get("axis", ""), named.get("chunks", 0), named.get("position", 0)


def quality_rows(
    part: str, questions: Sequence[FidelityQuestion], results: Results, seed: int
) -> list[dict[str, Any]]:
    """One row per way and group; ``low`` and ``high`` are the interval of ``f1``."""
    out: list[dict[str, Any]] = []
    for group in groups(questions):
        bootstrap = Bootstrap(len(group.members), seed)
        chosen = {way: [found[i] for i in group.members] for way, found in results.items()}
        out += (_row(part, group, way, chosen, bootstrap) for way in results)
    ways = list(results)  # way by way reads better than group by group
    return sorted(out, key=lambda row: ways.index(Way(row["policy"], row["encoder"])))


def layer_rows(results: Results, seed: int) -> list[dict[str, Any]]:
    """One row per way and layer: how far the chunks' keys and values are from those of ``full``."""
    bootstrap = Bootstrap(len(results[FULL]), seed)
    out: list[dict[str, Any]] = []
    for way, found in results.items():
        if way == FULL:
            continue
        for layer in range(len(found[0].key_deviation)):
            row: dict[str, Any] = {
                "part": LAYER,
                "policy": way.policy,
                "encoder": way.encoder,
                "layer": layer,
            }
            for name in _DEVIATIONS:
                row |= _mean(name, np.array([getattr(one, name)[layer] for one in found]), bootstrap)
            out.append({**row, "n": len(found)})
    return out


def ratio_asked(policy: str) -> float | None:
    """The ratio written in a policy's name (``query:0.15``, ``lego:4+query:0.1``), where there is one.

    Whole numbers are no ratios: ``lego:16`` counts tokens.
    """
    arguments = [part.partition(":")[2] for part in policy.split("+")]
    found = [float(argument) for argument in arguments if _is_ratio(argument)]
    return found[0] if len(found) == 1 else None


def normalized_f1(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    """(F1 - F1_reuse) / (F1_full - F1_reuse) of columns f1, f1_reuse, f1_full; NaN where full is no better.

    Design, section 4 (FusionRAG, section 5): F1_reuse is that of encoder ``system`` and policy ``reuse``.
    """
    f1, reuse, full = sums.T
    gap = full - reuse
    out: NDArray[np.float64] = np.full(len(gap), np.nan)
    np.divide(f1 - reuse, gap, out=out, where=gap > 1e-9)
    return out


def _row(
    part: str, group: Group, way: Way, chosen: Mapping[Way, list[Measurement]], bootstrap: Bootstrap
) -> dict[str, Any]:
    found = chosen[way]
    row: dict[str, Any] = {
        "part": part,
        **dict(group.cell),
        "policy": way.policy,
        "encoder": way.encoder,
        "question_type": group.question_type,
        "ratio_asked": ratio_asked(way.policy),
    }
    for name in _PLAIN:
        row |= _mean(name, np.array([getattr(one, name) for one in found], dtype=float), bootstrap)
    for name in _DEVIATIONS:
        row |= _mean(name, np.array([np.mean(getattr(one, name)) for one in found]), bootstrap)
    columns = np.array([[one.f1 for one in chosen[w]] for w in (way, REUSE, FULL)]).T
    interval = bootstrap.interval(columns, normalized_f1) or (None, None)
    value = float(normalized_f1(columns.sum(axis=0, keepdims=True))[0])
    row["normalized_f1"] = None if np.isnan(value) else value
    row["normalized_f1_low"], row["normalized_f1_high"] = interval if value == value else (None, None)
    row["low"], row["high"] = row.pop("f1_low"), row.pop("f1_high")
    return {**row, "n": len(found)}


def _mean(name: str, values: NDArray[np.float64], bootstrap: Bootstrap) -> dict[str, float]:
    low, high = bootstrap.of_mean(values)
    return {name: float(values.mean()), f"{name}_low": low, f"{name}_high": high}


def _is_ratio(argument: str) -> bool:
    try:
        return "." in argument and 0 <= float(argument) <= 1
    except ValueError:
        return False
