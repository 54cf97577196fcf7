"""Eviction policies against each other and against Belady's bound, on replayed requests (RAGCache 7.4)."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.eviction.bounds import most_hits, most_token_hits
from benchmarks.eviction.product import serve
from benchmarks.eviction.profiles import Costs, open_costs
from benchmarks.eviction.replay import CHUNKS, TREE, Outcome, Plan, Prompt, plan, replay
from benchmarks.eviction.tiers import GPU_COSTS, PREFILL, Tiers, TwoTierOutcome, replay_tiers
from benchmarks.eviction.traces import TRACES, Trace, TraceShape, open_trace, read_trace
from ragcachekit.commands.report import BenchReport
from ragcachekit.store.eviction import open_eviction

ONE_TIER, TWO_TIERS, PRODUCT = "one tier", "two tiers", "product"
PGDSF = "pgdsf"
POLICIES = ("lru", "lfu", "lfu:10000", "gdsf", "pgdsf", "f_r")
SHARES = (0.01, 0.02, 0.04, 0.08, 0.16)
HOST_BY_GPU = 8
"""Size of the host tier by that of the GPU tier."""

_SPREAD = ("hit_rate", "time_saved")


@dataclass(frozen=True)
class EvictionSettings:
    """What to replay.

    Attributes
    ----------
    traces : tuple of str
        Names of drawn traces; not used with ``file``.
    file : Path or None
        A trace of the user's, see :func:`~benchmarks.eviction.traces.read_trace`.
    policies : tuple of str
        See :func:`~ragcachekit.store.eviction.open_eviction`.
    shares : tuple of float
        Capacities as shares of the tokens of all documents (for two tiers: of the GPU tier).
    structures : tuple of str
        ``tree``, ``chunks`` or both.
    seeds : int
        How many traces of each kind are drawn, from ``seed`` on.
    tiers : bool
        Also replay PGDSF over two tiers, where these together do not hold all documents.
    product : bool
        Also serve the requests by a store and a tree as the product opens them.
    profile : str
        See :func:`~benchmarks.eviction.profiles.open_costs`.
    """

    traces: tuple[str, ...] = tuple(TRACES)
    file: Path | None = None
    policies: tuple[str, ...] = POLICIES
    shares: tuple[float, ...] = SHARES
    structures: tuple[str, ...] = (TREE, CHUNKS)
    seeds: int = 5
    seed: int = 0
    tiers: bool = True
    product: bool = False
    profile: str = "llama-3.1-8b"
    shape: TraceShape = field(default_factory=TraceShape)
    prompt: Prompt = field(default_factory=Prompt)

    def __post_init__(self) -> None:
        if self.seeds < 1:
            raise ValueError(f"seeds must be at least 1, got {self.seeds}")
        if not self.shares or not all(0 < share <= 1 for share in self.shares):
            raise ValueError(f"sizes are shares of the documents' tokens, above 0 up to 1, got {self.shares}")
        if unknown := set(self.structures) - {TREE, CHUNKS}:
            raise ValueError(f"unknown structure {', '.join(sorted(unknown))}; known: {TREE}, {CHUNKS}")
        for name in self.policies:
            open_eviction(name)


def run(settings: EvictionSettings, advance: Callable[[int], None] = lambda _: None) -> BenchReport:
    """Replay everything.

    Parameters
    ----------
    settings : EvictionSettings
    advance : callable
        Told after every capacity of every trace how many of :func:`steps` were done.

    Returns
    -------
    BenchReport
        Rows with ``part``. ``one tier``: per trace, structure, capacity and policy the medians over
        seeds, with ``_min`` and ``_max`` of hit rate and time saved; ``belady_hit_rate`` with the
        ``bound`` it is (see :mod:`~benchmarks.eviction.bounds`); and what PGDSF's hit rate and
        time saved are by this policy's on the same seeds. ``two tiers``: PGDSF with each ``gpu_cost``.
        ``product``: as ``one tier``, without the bound.

    Raises
    ------
    ValueError
        For what the settings name and nobody knows, and for a bad trace file.
    """
    costs = open_costs(settings.profile)
    rows: list[dict[str, Any]] = []
    for traces in _traces(settings):
        for structure in settings.structures:
            plans = [plan(trace, structure, costs.profile, settings.prompt) for trace in traces]
            for share in settings.shares:
                rows += _one_tier(plans, share, settings, costs)
                advance(1)
                if settings.product:
                    rows += _product(plans, share, settings, costs)
                    advance(1)
        if settings.tiers and costs.load_seconds is not None:
            plans = [plan(trace, TREE, costs.profile, settings.prompt) for trace in traces]
            for share in settings.shares:
                if share * (1 + HOST_BY_GPU) < 1:  # else nothing would ever leave the host
                    rows += _two_tiers(plans, share, settings, costs)
                advance(1)
    return BenchReport("eviction", costs.label, settings.seed, tuple(rows))


def steps(settings: EvictionSettings) -> int:
    """How much there is to do."""
    traces = 1 if settings.file is not None else len(settings.traces)
    return (
        traces * len(settings.shares) * (len(settings.structures) * (1 + settings.product) + settings.tiers)
    )


def _traces(settings: EvictionSettings) -> Iterator[list[Trace]]:
    if settings.file is not None:
        yield [read_trace(settings.file, settings.shape.mean_tokens)]
        return
    for name in settings.traces:
        yield [open_trace(name, settings.shape, settings.seed + number) for number in range(settings.seeds)]


def _one_tier(
    plans: Sequence[Plan], share: float, settings: EvictionSettings, costs: Costs
) -> list[dict[str, Any]]:
    sizes = [_capacity(plan, share) for plan in plans]
    bounds = [_Bound.of(plan, size) for plan, size in zip(plans, sizes, strict=True)]
    found = {
        policy: [
            replay(plan, open_eviction(policy), size, costs.profile, settings.prompt)
            for plan, size in zip(plans, sizes, strict=True)
        ]
        for policy in settings.policies
    }
    return [
        {
            **_head(ONE_TIER, plans, share, policy, sizes),
            **_medians(outcomes, plans),
            **_against(bounds, outcomes),
            **_ratios(found.get(PGDSF), outcomes),
        }
        for policy, outcomes in found.items()
    ]


def _product(
    plans: Sequence[Plan], share: float, settings: EvictionSettings, costs: Costs
) -> list[dict[str, Any]]:
    sizes = [_capacity(plan, share) for plan in plans]
    found = {
        policy: [
            serve(plan, policy, size, costs.profile, settings.prompt)
            for plan, size in zip(plans, sizes, strict=True)
        ]
        for policy in settings.policies
    }
    return [
        {
            **_head(PRODUCT, plans, share, policy, sizes),
            **_medians(outcomes, plans),
            **_ratios(found.get(PGDSF), outcomes),
        }
        for policy, outcomes in found.items()
    ]


def _two_tiers(
    plans: Sequence[Plan], share: float, settings: EvictionSettings, costs: Costs
) -> list[dict[str, Any]]:
    sizes = [_capacity(plan, share) for plan in plans]
    bounds = [_Bound.of(plan, size * (1 + HOST_BY_GPU)) for plan, size in zip(plans, sizes, strict=True)]
    found = {
        cost: [
            _over_tiers(plan, size, cost, settings, costs) for plan, size in zip(plans, sizes, strict=True)
        ]
        for cost in GPU_COSTS
    }
    paper = [outcome.all.time_saved for outcome in found[PREFILL]]
    rows = []
    for cost, outcomes in found.items():
        both = [outcome.all for outcome in outcomes]
        gain = [o.time_saved - base for o, base in zip(both, paper, strict=True)]
        rows.append(
            {
                **_head(TWO_TIERS, plans, share, PGDSF, sizes),
                "gpu_cost": cost,
                "gpu_hit_rate": statistics.median(o.gpu_hit_rate for o in outcomes),
                **_medians(both, plans),
                **_against(bounds, both),
                "gain": statistics.median(gain),
                "gain_min": min(gain),
                "gain_max": max(gain),
            }
        )
    return rows


def _over_tiers(plan: Plan, size: int, cost: str, settings: EvictionSettings, costs: Costs) -> TwoTierOutcome:
    assert costs.load_seconds is not None
    tiers = Tiers(size, HOST_BY_GPU * size, costs.load_seconds, cost)
    return replay_tiers(plan, lambda: open_eviction(PGDSF), tiers, costs.profile, settings.prompt)


def _capacity(plan: Plan, share: float) -> int:
    return max(1, int(share * plan.trace.corpus_tokens))


def _head(part: str, plans: Sequence[Plan], share: float, policy: str, sizes: list[int]) -> dict[str, Any]:
    return {
        "part": part,
        "trace": plans[0].trace.name,
        "structure": plans[0].structure,
        "capacity_share": share,
        "capacity": int(statistics.median(sizes)),
        "policy": policy,
        "seeds": len(plans),
    }


def _medians(outcomes: Sequence[Outcome], plans: Sequence[Plan]) -> dict[str, float]:
    every = [asdict(outcome) for outcome in outcomes]
    row = {name: statistics.median(one[name] for one in every) for name in every[0]}
    for name in _SPREAD:
        row[f"{name}_min"] = min(one[name] for one in every)
        row[f"{name}_max"] = max(one[name] for one in every)
    row["saved_ms_per_request"] = statistics.median(
        1e3 * outcome.time_saved * plan.full_seconds / len(plan.requests)
        for outcome, plan in zip(outcomes, plans, strict=True)
    )
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
