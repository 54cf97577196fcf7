"""The demo's one plot: what stayed right, and how much sooner the first token came."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.demo.score import ALL
from ragcachekit.commands.bench.report import BenchReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {
    "full": "#4d4d4d",
    "lego:2 on similar:1": "#2a9d6f",
    "deep:0.1": "#8e5ea2",
    "lego:16": "#1b6ca8",
    "lego:4": "#6fa8dc",
    "reuse": "#e08e45",
    "lego0": "#c9b458",
}
OTHER = "#9b9b9b"
TYPES = {"a": "(a) one chunk", "b": '(b) "This person ..."', "c": "(c) two articles", ALL: "all"}


def draw(answers: BenchReport, speed: BenchReport, path: Path) -> None:
    """Write the plot as an image; the name's ending says which kind."""
    from matplotlib.figure import Figure  # not pyplot, which keeps figures in a global list

    figure = Figure(figsize=(12.5, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.35, 1))
    _answers(left, answers)
    _speed(right, speed)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def _answers(axes: Axes, answers: BenchReport) -> None:
    rows = [row for row in answers.rows if row["part"] == "policy"]
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    width = 0.82 / len(policies)
    for number, policy in enumerate(policies):
        found = {row["question_type"]: row for row in rows if row["policy"] == policy}
        shares = [found[kind]["exact_match"] for kind in TYPES]
        errors = [
            [found[kind]["exact_match"] - found[kind]["low"] for kind in TYPES],
            [found[kind]["high"] - found[kind]["exact_match"] for kind in TYPES],
        ]
        places = [at + (number - (len(policies) - 1) / 2) * width for at in range(len(TYPES))]
        axes.bar(places, shares, width * 0.92, color=COLOURS.get(policy, OTHER), label=_label(found[ALL]))
        # An interval of a share of 1 reaches below it only; rounding must not make that negative.
        bars = [[max(0.0, error) for error in side] for side in errors]
        axes.errorbar(places, shares, bars, fmt="none", ecolor="#222222", elinewidth=0.8, capsize=1.5)
    axes.set_xticks(range(len(TYPES)), list(TYPES.values()))
    axes.set_ylim(0, 1.02)
    axes.set_ylabel("exact match")
    axes.grid(axis="y", alpha=0.25)
    axes.set_axisbelow(True)
    n = next(row["n"] for row in rows if row["question_type"] == ALL)
    axes.set_title(f"Answers: trained reader, sample corpus, {n} questions (95 % intervals)", fontsize=10)
    axes.legend(
        ncols=min(5, len(policies)),
        fontsize=8,
        frameon=False,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.08),
    )


def _label(row: dict[str, Any]) -> str:
    return f"{row['policy']}\n{row['tokens_reused']:.0%} reused"


def _speed(axes: Axes, speed: BenchReport) -> None:
    rows = list(reversed(speed.rows))
    milliseconds = [row["ttft_ms"] for row in rows]
    axes.barh(range(len(rows)), milliseconds, 0.7, color=[COLOURS.get(row["policy"], OTHER) for row in rows])
    for at, row in enumerate(rows):
        axes.plot([row["ttft_ms_min"], row["ttft_ms_max"]], [at, at], color="#222222", linewidth=0.8)
        end = max(row["ttft_ms_max"], row["ttft_ms"])
        axes.annotate(
            f"{row['ttft_ms']:,.0f} ms  ({row['speedup']:.{2 if row['speedup'] < 2 else 1}f}x)",
            (end, at),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            fontsize=8.5,
        )
    axes.set_yticks(range(len(rows)), [speed_label(row) for row in rows])
    axes.set_xlim(0, 1.32 * max(row["ttft_ms_max"] for row in rows))
    axes.set_xlabel("time to first token in ms")
    axes.grid(axis="x", alpha=0.25)
    axes.set_axisbelow(True)
    tokens = max(row["prompt_tokens"] for row in rows)
    axes.set_title(f"Speed: Python's manual, prompts of ~{tokens:,} tokens\n{speed.model}", fontsize=10)


def speed_label(row: dict[str, Any]) -> str:
    """Policy, and where its chunks were."""
    if row["policy"] == "full":
        return "full"
    where = "nothing cached" if row["state"] == "cold" else f"warm, {row['tier']}"
    return f"{row['policy']}\n{where}"
