"""Eviction policies against each other and against Belady's bound, on replayed requests (RAGCache 7.4)."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from tqdm.auto import tqdm

from benchmarks.eviction.bounds import most_hits, most_token_hits
from benchmarks.eviction.replay import CHUNKS, TREE, Outcome, Plan, plan, replay
from benchmarks.eviction.traces import TRACES, Trace, TraceShape, open_trace, read_trace
from benchmarks.output import Plot, written
from ragcachekit.commands.console import show
from ragcachekit.commands.options import Json, names, numbers
from ragcachekit.commands.report import BenchReport, table
from ragcachekit.store.eviction import open_eviction

PGDSF = "pgdsf"
POLICIES = ("lru", "lfu", "lfu:10000", "gdsf", PGDSF, "f_r")
SHARES = (0.01, 0.02, 0.04, 0.08, 0.16)
PAPER = {"gdsf": "1.02-1.32", "lru": "1.06-1.62", "lfu": "1.06-1.75"}
"""PGDSF's document hit rate by these policies' (RAGCache section 7.4)."""

_SPREAD = ("hit_rate", "time_saved")
_Row = dict[str, Any]


def eviction(
    traces: Annotated[
        str | None, typer.Option(help="With commas between: zipf, zipf-equal, local, shifting, scan.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help='Your own, JSONL: {"docs": ["id", ...]} or {"docs": [{"id":, "tokens":}, ...]}.'),
    ] = None,
    policies: Annotated[
        str | None, typer.Option(help="With commas between: lru, lfu, gdsf, pgdsf:20000, f_r, ...")
    ] = None,
    sizes: Annotated[
        str | None, typer.Option(help="Capacities as shares of all documents' tokens: 0.01,0.04.")
    ] = None,
    structure: Annotated[
        str, typer.Option(help="tree (exact prefixes), chunks (any place), or both.")
    ] = "tree,chunks",
    seeds: Annotated[int, typer.Option(min=1, help="Drawn traces of each kind.")] = 5,
    documents: Annotated[int, typer.Option(min=1)] = 2000,
    requests: Annotated[int, typer.Option(min=1)] = 4000,
    top_k: Annotated[int, typer.Option(min=1, help="Documents per request.")] = 2,
    tokens: Annotated[
        int, typer.Option(min=1, help="Mean size of a document; with --trace, of those without one.")
    ] = 3718,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """Replay requests against every eviction policy and Belady's bound."""
    if trace is not None and traces is not None:
        raise ValueError("give --trace FILE or --traces NAMES, not both")
    settings = EvictionSettings(
        traces=names(traces) or tuple(TRACES),
        file=trace,
        policies=names(policies) or POLICIES,
        shares=numbers("--sizes", sizes) if sizes is not None else SHARES,
        structures=names(structure),
        seeds=seeds,
        shape=TraceShape(documents, requests, top_k, tokens),
    )
    report = run(settings, progress=True)
    for one in tables(report):
        show(one)
    written(report, json, plot, draw)


@dataclass(frozen=True)
class EvictionSettings:
    """What to replay: drawn ``traces`` of each of ``seeds`` seeds, or the ``file`` of a user.

    ``shares`` are capacities as shares of the tokens of all documents; ``structures`` ``tree``, ``chunks`` or
    both.
    """

    traces: tuple[str, ...] = tuple(TRACES)
    file: Path | None = None
    policies: tuple[str, ...] = POLICIES
    shares: tuple[float, ...] = SHARES
    structures: tuple[str, ...] = (TREE, CHUNKS)
    seeds: int = 5
    shape: TraceShape = field(default_factory=TraceShape)

    def __post_init__(self) -> None:
        if not self.shares or not all(0 < share <= 1 for share in self.shares):
            raise ValueError(f"sizes are shares of the documents' tokens, above 0 up to 1, got {self.shares}")
        if unknown := set(self.structures) - {TREE, CHUNKS}:
            raise ValueError(f"unknown structure {', '.join(sorted(unknown))}; known: {TREE}, {CHUNKS}")
        for name in self.policies:
            open_eviction(name)


def run(settings: EvictionSettings, *, progress: bool = False) -> BenchReport:
    """Replay everything.

    A row per trace, structure, capacity and policy: medians over seeds, with ``_min`` and ``_max`` of hit
    rate and time saved; ``belady_hit_rate`` with the ``bound`` it is (see ``bounds.py``); and what PGDSF's
    hit rate and time saved are by this policy's on the same seeds. ValueError for an unknown trace or a bad
    trace file.
    """
    rows: list[_Row] = []
    for traces in tqdm(list(_traces(settings)), desc="replaying", unit="trace", disable=not progress):
        for structure in settings.structures:
            plans = [plan(trace, structure) for trace in traces]
            for share in settings.shares:
                rows += _cell(plans, share, settings.policies)
    return BenchReport("eviction", "llama-3.1-8b shape, by arithmetic", 0, tuple(rows))


def _traces(settings: EvictionSettings) -> Iterator[list[Trace]]:
    if settings.file is not None:
        yield [read_trace(settings.file, settings.shape.mean_tokens)]
        return
    for name in settings.traces:
        yield [open_trace(name, settings.shape, seed) for seed in range(settings.seeds)]


def _cell(plans: Sequence[Plan], share: float, policies: Sequence[str]) -> list[_Row]:
    sizes = [max(1, int(share * plan.trace.corpus_tokens)) for plan in plans]
    each = list(zip(plans, sizes, strict=True))
    bounds = [_Bound.of(plan, size) for plan, size in each]
    found = {
        policy: [replay(plan, open_eviction(policy), size) for plan, size in each] for policy in policies
    }
    return [
        {
            "trace": plans[0].trace.name,
            "structure": plans[0].structure,
            "capacity_share": share,
            "capacity": int(statistics.median(sizes)),
            "policy": policy,
            "seeds": len(plans),
            **_medians(outcomes),
            **_against(bounds, outcomes),
            **_ratios(found.get(PGDSF), outcomes),
        }
        for policy, outcomes in found.items()
    ]


def _medians(outcomes: Sequence[Outcome]) -> dict[str, float]:
    every = [asdict(outcome) for outcome in outcomes]
    row = {name: statistics.median(one[name] for one in every) for name in every[0]}
    for name in _SPREAD:
        row[f"{name}_min"] = min(one[name] for one in every)
        row[f"{name}_max"] = max(one[name] for one in every)
    return row


def _ratios(pgdsf: Sequence[Outcome] | None, others: Sequence[Outcome]) -> dict[str, float | None]:
    """PGDSF's figures by another policy's, seed by seed; None where that has none."""
    row: dict[str, float | None] = {}
    for name, short in (("hit_rate", "hit"), ("time_saved", "time")):
        pairs = [(getattr(a, name), getattr(b, name)) for a, b in zip(pgdsf or (), others, strict=False)]
        ratios = [a / b for a, b in pairs if b > 0]
        row[f"pgdsf_{short}_ratio"] = statistics.median(ratios) if ratios else None
        row[f"pgdsf_{short}_ratio_min"] = min(ratios, default=None)
        row[f"pgdsf_{short}_ratio_max"] = max(ratios, default=None)
    return row


@dataclass(frozen=True)
class _Bound:
    """No cache finds more than these shares of documents and of their tokens."""

    hit_rate: float
    token_hit_rate: float
    kind: str

    @classmethod
    def of(cls, plan: Plan, capacity: int) -> _Bound:
        accesses = [entry for request in plan.requests for entry in request]
        asked = sum(plan.tokens[entry] for entry in accesses)
        equal = len({plan.tokens[entry] for entry in accesses}) == 1
        return cls(
            most_hits(accesses, plan.tokens, capacity) / len(accesses),
            most_token_hits(accesses, plan.tokens, capacity) / asked,
            "MIN" if equal else "PFOO-L",
        )


def _against(bounds: Sequence[_Bound], outcomes: Sequence[Outcome]) -> dict[str, Any]:
    shares = [o.hit_rate / b.hit_rate for o, b in zip(outcomes, bounds, strict=True) if b.hit_rate]
    return {
        "belady_hit_rate": statistics.median(bound.hit_rate for bound in bounds),
        "belady_token_hit_rate": statistics.median(bound.token_hit_rate for bound in bounds),
        "bound": bounds[0].kind,
        "share_of_belady": statistics.median(shares) if shares else None,
    }


def tables(report: BenchReport) -> Iterator[Table]:
    """Documents found and time saved by policy, PGDSF's ratios, and how safe each policy is."""
    for title, name in (("Documents found", "hit_rate"), ("Prefill time saved", "time_saved")):
        pivot = []
        for (trace, structure, share), cells in _grouped(
            report.rows, "trace", "structure", "capacity_share"
        ).items():
            row = {"trace": trace, "structure": structure, "cache": f"{100 * share:g} %"}
            bound = {"bound": cells[0]["belady_hit_rate"]} if name == "hit_rate" else {}
            pivot.append(row | {cell["policy"]: cell[name] for cell in cells} | bound)
        yield table(f"{title}: medians over {report.rows[0]['seeds']} seeds ({report.model})", pivot)
    yield table("PGDSF by the others: range of the medians over the sizes", ratio_rows(report))
    yield table("Share of the best policy's hit rate, in each policy's worst cell", safety_rows(report))


def ratio_rows(report: BenchReport) -> list[_Row]:
    """Per trace, structure and policy the range over the sizes of PGDSF's ratios, and the cells it lost."""
    rows = [r for r in report.rows if r["policy"] != PGDSF and r["pgdsf_hit_ratio"] is not None]
    out = []
    for (trace, structure, policy), cells in _grouped(rows, "trace", "structure", "policy").items():
        row = {"trace": trace, "structure": structure, "by": policy, "paper": PAPER.get(policy, "-")}
        for name in ("hit", "time"):
            values = [cell[f"pgdsf_{name}_ratio"] for cell in cells]
            row[f"{name}_ratio"] = f"{min(values):.2f} to {max(values):.2f}"
            row[f"{name}_cells_lost"] = f"{sum(value < 1 for value in values)} of {len(cells)}"
        out.append(row)
    return out


def safety_rows(report: BenchReport) -> list[_Row]:
    """Per structure and policy its lowest share of the best policy's hit rate, and where that was."""
    best = {
        key: max(row["hit_rate"] for row in cells)
        for key, cells in _grouped(report.rows, "trace", "structure", "capacity_share").items()
    }
    out = []
    for (structure, policy), cells in _grouped(report.rows, "structure", "policy").items():
        shares = [(r["hit_rate"] / (best[r["trace"], structure, r["capacity_share"]] or 1), r) for r in cells]
        worst, row = min(shares, key=lambda pair: pair[0])
        out.append(
            {
                "structure": structure,
                "policy": policy,
                "worst_share": worst,
                "there": f"{row['trace']}, {100 * row['capacity_share']:g} %",
                "best_in": f"{sum(share == 1 for share, _ in shares)} of {len(shares)}",
            }
        )
    return out


def draw(report: BenchReport, path: Path) -> None:
    """Draw hit rate (above) and prefill time saved (below) over the capacity, one column per trace."""
    from matplotlib.figure import Figure  # not pyplot, which keeps figures in a global list

    structure = report.rows[0]["structure"]
    rows = [row for row in report.rows if row["structure"] == structure]
    traces = _grouped(rows, "trace")
    figure = Figure(figsize=(2.6 * len(traces) + 1.6, 5), layout="constrained")
    grid = figure.subplots(2, len(traces), squeeze=False, sharex=True, sharey="row")
    for column, ((trace,), own) in enumerate(traces.items()):
        for axes, name in zip(grid[:, column], _SPREAD, strict=True):
            for (policy,), line in _grouped(own, "policy").items():
                x = [row["capacity_share"] for row in line]
                (drawn,) = axes.plot(x, [row[name] for row in line], "o-", ms=3, lw=1.2, label=policy)
                low, high = ([row[f"{name}_{end}"] for row in line] for end in ("min", "max"))
                axes.fill_between(x, low, high, color=drawn.get_color(), alpha=0.15, lw=0)
            axes.set_xscale("log", base=2)
            axes.set_xticks(x, [f"{100 * share:g} %" for share in x], fontsize=8)
            axes.minorticks_off()
        grid[0][column].plot(x, [row["belady_hit_rate"] for row in line], "k--", lw=1, label="bound")
        grid[0][column].set_title(trace)
        grid[1][column].set_xlabel("cache / all documents (tokens)")
    grid[0][0].set_ylabel(f"document hit rate ({structure})")
    grid[1][0].set_ylabel("prefill time saved")
    figure.legend(*grid[0][0].get_legend_handles_labels(), loc="outside right upper")
    figure.savefig(path, dpi=120)


def _grouped(rows: Iterable[_Row], *names: str) -> dict[tuple[Any, ...], list[_Row]]:
    out: dict[tuple[Any, ...], list[_Row]] = {}
    for row in rows:
        out.setdefault(tuple(row[name] for name in names), []).append(row)
    return out
