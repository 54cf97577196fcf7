"""Tables and the picture of the eviction bench."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from benchmarks.eviction.run import ONE_TIER, PGDSF, PRODUCT, TWO_TIERS
from benchmarks.eviction.tiers import PREFILL
from ragcachekit.commands.report import BenchReport, table

PAPER = {"gdsf": "1.02-1.32", "lru": "1.06-1.62", "lfu": "1.06-1.75"}
"""PGDSF's document hit rate by these policies' (RAGCache section 7.4)."""

_MEASURES = {
    "hit_rate": ("Documents found", "belady_hit_rate"),
    "token_hit_rate": ("Tokens found", "belady_token_hit_rate"),
    "request_hit_rate": ("Requests of which all was found", None),
    "time_saved": ("Prefill time saved", None),
}
_Row = dict[str, Any]


def tables(report: BenchReport) -> list[Table]:
    """Every measure by policy, PGDSF's ratios beside the paper's, how safe each is, and the two tiers."""
    rows, tiers = _part(report, ONE_TIER), _part(report, TWO_TIERS)
    count = rows[0]["seeds"]
    seeds = f"medians over {count} seeds" if count > 1 else "one trace of each kind"
    out = [
        table(f"{title}: {seeds} ({report.model})", _pivot(rows, name, bound))
        for name, (title, bound) in _MEASURES.items()
    ]
    ratios = ratio_rows(report)
    if ratios:
        out.append(table("PGDSF by the others: range of the medians over the sizes", ratios))
    out.append(table("Share of the best policy's hit rate, in each policy's worst cell", safety_rows(report)))
    if product := ratio_rows(report, PRODUCT):
        out.append(table("The same through an open store and an open tree, with profiled costs", product))
    if tiers:
        out.append(
            table(
                "PGDSF over GPU and host, by what a GPU miss counts as: ranges over the sizes",
                tier_rows(report),
            )
        )
    return out


def ratio_rows(report: BenchReport, part: str = ONE_TIER) -> list[_Row]:
    """Per trace, structure and policy the range over the sizes of PGDSF's ratios, and the cells it lost."""
    rows = [r for r in _part(report, part) if r["policy"] != PGDSF and r["pgdsf_hit_ratio"] is not None]
    return [
        {
            "trace": trace,
            "structure": structure,
            "by": policy,
            "hit_ratio": _range(cells, "pgdsf_hit_ratio"),
            "paper": PAPER.get(policy, "-"),
            "time_ratio": _range(cells, "pgdsf_time_ratio"),
            "hit_cells_lost": f"{sum(r['pgdsf_hit_ratio'] < 1 for r in cells)} of {len(cells)}",
            "time_cells_lost": f"{sum(r['pgdsf_time_ratio'] < 1 for r in cells)} of {len(cells)}",
        }
        for (trace, structure, policy), cells in _grouped(rows, "trace", "structure", "policy").items()
    ]


def safety_rows(report: BenchReport) -> list[_Row]:
    """Per structure and policy its lowest share of the best policy's hit rate, and where that was."""
    rows = _part(report, ONE_TIER)
    best = {
        key: max(row["hit_rate"] for row in cells)
        for key, cells in _grouped(rows, "trace", "structure", "capacity_share").items()
    }
    out = []
    for (structure, policy), cells in _grouped(rows, "structure", "policy").items():
        shares = [(r["hit_rate"] / (best[r["trace"], structure, r["capacity_share"]] or 1), r) for r in cells]
        worst, row = min(shares, key=lambda pair: pair[0])
        out.append(
            {
                "structure": structure,
                "policy": policy,
                "worst_share": worst,
                "there": f"{row['trace']}, {_percent(row['capacity_share'])}",
                "best_in": f"{sum(share == 1 for share, _ in shares)} of {len(shares)}",
            }
        )
    return out


def tier_rows(report: BenchReport) -> list[_Row]:
    """Per trace and cost the ranges over the sizes; gains in time saved over the paper's cost, in points."""
    return [
        {
            "trace": trace,
            "gpu_cost": cost,
            "gpu_hit_rate": _range(cells, "gpu_hit_rate"),
            "hit_rate": _range(cells, "hit_rate"),
            "time_saved": _range(cells, "time_saved"),
            "gain_in_points": "-" if cost == PREFILL else _range(cells, "gain", 100),
            "won_on_every_seed": "-"
            if cost == PREFILL
            else f"{sum(row['gain_min'] > 0 for row in cells)} of {len(cells)}",
        }
        for (trace, cost), cells in _grouped(_part(report, TWO_TIERS), "trace", "gpu_cost").items()
    ]


def verdict(report: BenchReport) -> str | None:
    """Whether a reload's cost wins in the GPU tier; None if two tiers were not replayed."""
    others = [row for row in _part(report, TWO_TIERS) if row["gpu_cost"] != PREFILL]
    if not others:
        return None
    best = max(others, key=lambda row: row["gain"])
    worst = min(others, key=lambda row: row["gain"])
    won = sum(row["gain_min"] > 0 for row in others)
    return (
        f"a reload's cost beats the prefill's on every seed in {won} of {len(others)} cells; "
        f"it changes the time saved by {100 * worst['gain']:+.2f} to {100 * best['gain']:+.2f} points"
    )


def plot(report: BenchReport, path: str | os.PathLike[str]) -> None:
    """Draw hit rate (above) and prefill time saved (below) over the capacity, one column per trace."""
    from matplotlib.figure import Figure  # not pyplot, which keeps figures in a global list

    rows = _part(report, ONE_TIER)
    structure = rows[0]["structure"]
    rows = [row for row in rows if row["structure"] == structure]
    traces = list(dict.fromkeys(row["trace"] for row in rows))
    figure = Figure(figsize=(2.6 * len(traces) + 1.6, 5), layout="constrained")
    grid = figure.subplots(2, len(traces), squeeze=False, sharex=True, sharey="row")
    for column, trace in enumerate(traces):
        own = [row for row in rows if row["trace"] == trace]
        for axes, name in ((grid[0][column], "hit_rate"), (grid[1][column], "time_saved")):
            _lines(axes, own, name)
        grid[0][column].set_title(trace)
        grid[1][column].set_xlabel("cache / all documents (tokens)")
    bound = [row for row in rows if row["policy"] == rows[0]["policy"]]
    for column, trace in enumerate(traces):
        line = [row for row in bound if row["trace"] == trace]
        x = [row["capacity_share"] for row in line]
        grid[0][column].plot(x, [row["belady_hit_rate"] for row in line], "k--", lw=1, label="bound")
    grid[0][0].set_ylabel(f"document hit rate ({structure})")
    grid[1][0].set_ylabel("prefill time saved")
    figure.legend(*grid[0][0].get_legend_handles_labels(), loc="outside right upper")
    figure.savefig(path, dpi=120)


def _lines(axes: Any, rows: Sequence[_Row], name: str) -> None:
    for policy in dict.fromkeys(row["policy"] for row in rows):
        line = [row for row in rows if row["policy"] == policy]
        x = [row["capacity_share"] for row in line]
        (drawn,) = axes.plot(x, [row[name] for row in line], "o-", ms=3, lw=1.2, label=policy)
        low, high = [row[f"{name}_min"] for row in line], [row[f"{name}_max"] for row in line]
        axes.fill_between(x, low, high, color=drawn.get_color(), alpha=0.15, lw=0)
    shares = sorted({row["capacity_share"] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(shares, [_percent(share) for share in shares], fontsize=8)
    axes.minorticks_off()


def _part(report: BenchReport, name: str) -> list[_Row]:
    return [row for row in report.rows if row["part"] == name]


def _grouped(rows: Sequence[_Row], *names: str) -> dict[tuple[Any, ...], list[_Row]]:
    out: dict[tuple[Any, ...], list[_Row]] = {}
    for row in rows:
        out.setdefault(tuple(row[name] for name in names), []).append(row)
    return out


def _pivot(rows: Sequence[_Row], name: str, bound: str | None) -> list[_Row]:
    """One row per cell, one column per policy."""
    out = []
    for (trace, structure, share), cells in _grouped(rows, "trace", "structure", "capacity_share").items():
        row = {"trace": trace, "structure": structure, "cache": _percent(share)}
        row |= {cell["policy"]: cell[name] for cell in cells}
        if bound is not None:
            row["bound"] = cells[0][bound]
        out.append(row)
    return out


def _range(cells: Sequence[_Row], name: str, times: float = 1.0) -> str:
    values = [times * cell[name] for cell in cells]
    return f"{min(values):.2f} to {max(values):.2f}"


def _percent(share: float) -> str:
    return f"{100 * share:g} %"
